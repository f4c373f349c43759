"""Number formats of weights and rows, and the matrix products in them.

`fp8_rows` is what activations in FP8 are; `deep_gemm` is the library on Hopper, `triton_gemm` ours
for GPUs without it, `expert_stream` ours for experts with few rows; `expert_matrix` is the weights
of a rank's experts in any of them.
"""
