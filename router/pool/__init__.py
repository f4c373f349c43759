"""Who is there and how loaded: the registry of workers, and each HTTP process's view of it.

A worker is there while its lease is renewed, by a clock that stands still while the router does.
"""
