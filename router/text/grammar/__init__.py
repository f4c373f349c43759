"""Grammars that an output has to follow: of JSON schemas, calls of tools, patterns and choices.

``schema`` and ``pattern`` bring what clients send into the form that the library handles well,
``formats`` puts formats together, ``compilers`` has the process in which they become grammars.
"""
