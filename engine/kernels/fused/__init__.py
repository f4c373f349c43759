"""Kernels of our own, in Triton, of attention, number formats and sampling; how they are launched.

Each module holds one family and is imported only where a GPU runs it. Every function has a plain
counterpart, which says what it computes. Those of other operations are in `engine.ops`.
"""
