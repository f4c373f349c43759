"""Text in and out: tokenizer, chat template, control tokens, detokenizer, stop strings, messages.

``output`` puts together what becomes of a choice's tokens; ``message`` tells its parts apart, with
``marks``, ``reasoning`` and ``calls``.

``lanes`` has the threads for what would hold up the event loop.
"""
