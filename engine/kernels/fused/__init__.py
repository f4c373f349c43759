"""Kernels of our own, in Triton: the memory-bound steps between the matrix products.

Each module holds one family and is imported only where a GPU runs it. Every function has a plain
counterpart in `engine.kernels.reference`, which says what it computes.
"""
