"""Products in block FP8 with few rows (1 to 128), which cost what reading their weight costs.

- `cuts`: how a product is cut into programs. `tables`: which cuts were measured to be best, and
  faster than DeepGEMM, on one kind of GPU (`configs/*.json`).
- `product`: the kernel, in Triton. `gemm`: allocates, chooses and launches.

Only `product` and `gemm` need Triton.
"""
