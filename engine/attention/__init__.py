"""Attention: what a model keeps of a token, how a step's sequences attend, and by which kernels.

`backend` is the seam and `kv_spec` the numbers; `latent` (MLA) and `grouped` are the backends.
`attention_plan` and what it stands on choose a form for each sequence. `kernels` is what a backend
asks of a device: `reference_kernels` and `gpu_kernels` implement it; `engine.kernels.create`
chooses. The second is put together from `flash_mla`, `flash_attention`, `torch_attention` and
`paged_mla`; the `*_reference` files are what they are tested against.
"""
