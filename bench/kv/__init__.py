"""Measures KV transfer between two processes, in the sender and receiver that the workers use.

- ``memory``: pools of random content on host or GPU, their checksums, the plain copy as the bound.
- ``sides``: the prefill and the decode process. ``measure``: starts both, collects, summarises.

Needs no cluster and no Ray: kv_transfer, numpy, and torch where the memory is a GPU's.
"""
