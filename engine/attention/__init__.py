"""Attention: what a model keeps of a token, how a step's sequences attend, and by which kernels.

`backend` is the seam and `kv_spec` the numbers; `latent` (MLA) and `grouped` are the backends.
`attention_plan` and what it stands on choose a form for each sequence. `flash_mla`,
`flash_attention`, `torch_attention` and `paged_mla` are the implementations, chosen by
`attention_choice` and `engine.kernels.create`; the `*_reference` files are what they are tested
against.
"""
