"""``/v1/responses`` in OpenAI's shape: its bodies, which become chat requests, and its answers.

Pure. Nothing is stored: a conversation is what the client sends, items of earlier answers included.
"""
