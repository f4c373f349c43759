"""Masked products of few rows per expert, on GPUs that copy tiles by themselves (Hopper).

- `tiles`: how a GEMM is tiled, what that takes of an SM, and which cut serves which
  number of rows. `kernel`: the product, in Triton. `mlp`: the experts' gated MLP made of two.

Only `kernel` and `mlp` need Triton.
"""
