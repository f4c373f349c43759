"""Products in block FP8 for GPUs that DeepGEMM does not know: Ampere, Ada, and what comes after.

- `limits`: what a GPU can hold and multiply. `tiles`: a product's shape, and how it is cut.
- `candidates`: the cuts that a GPU can run, best guess first. `tables`: the cuts that were measured
  to be best on one kind of GPU (`configs/*.json`, written by `tandem bench tune`), and the choice.
- `product`: the kernel, in Triton. `gemm`: allocates, chooses and launches. `byte_quant`: quantises
  where the GPU does not know the number format.

Only `product`, `gemm` and `byte_quant` need Triton.
"""
