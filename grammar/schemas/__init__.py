"""Rules of JSON schemas, tool calls, patterns and choices.

``schema`` reads what clients send, ``documents`` makes rules of it (``strings``, ``numbers``,
``pattern``), and ``forms`` puts the parts of an output together.
"""
