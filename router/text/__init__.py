"""Text in and out: tokenizer, chat template, control tokens, detokenizer, stop strings.

``lanes`` has the threads for what would hold up the event loop.
"""
