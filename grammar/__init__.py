"""What an output may look like: grammars over the vocabulary, and which tokens they leave.

``schemas`` makes rules of what clients send, ``compilers`` has the process in which they become
grammars and are tried (``walks``), ``constraints`` has what a worker follows, and ``guard`` the
process in which masks are made that may take long.
"""
