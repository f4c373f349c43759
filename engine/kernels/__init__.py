"""The operations that layers ask a device for, and the sets of them; `reference` is the oracle.

Plain PyTorch is what runs on a CPU, too. Attention and the products in FP8 have packages of their
own, `engine.attention` and `engine.formats`; a set (`portable`, `hopper`, `triton_kernels`) joins
them all.
"""
