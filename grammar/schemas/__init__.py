"""Rules of JSON schemas and patterns.

``schema`` reads what clients send, and ``documents`` makes rules of it (``strings``, ``numbers``,
``pattern``).
"""
