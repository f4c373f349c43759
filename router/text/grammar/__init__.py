"""Grammars that an output has to follow: of JSON schemas, tool calls, patterns and choices.

``schema`` reads what clients send, ``documents`` makes rules of it (``strings``, ``numbers``,
``pattern``), ``forms`` puts the parts of an output together, and ``compilers`` has the process in
which all of that becomes a grammar.
"""
