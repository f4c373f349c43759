"""Grammars of whole outputs: ``forms`` puts their parts together, ``compilers`` has the process in
which they are compiled and tried.
"""
