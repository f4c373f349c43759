"""What an output may look like: grammars over the vocabulary, and which tokens they leave.

``schemas`` makes rules of what clients send, ``compile_process`` compiles them for a router and
tries them (``walks``), ``constraints`` has what a worker follows, and ``guard`` the process in
which masks are made that may take long.
"""
