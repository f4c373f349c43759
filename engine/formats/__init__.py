"""Number formats of weights and rows, and the matrix products in them.

`base` says what a format is, `registry` which there are: `plain`, and `fp8_block` with its
`fp8_rows`. `fp8_products` and `fp8_triton` put its products together: `deep_gemm` is the library on
Hopper, `triton_gemm` ours for GPUs without it, `expert_stream` ours for experts with few rows.
`expert_rows` are the layouts in which rows stand at experts.
"""
