"""Measures the engine on this host: prefill and decode, one process a GPU, without a cluster.

- ``options``: what is measured; ``shapes``: the model that stands for it, and under which name.
- ``launcher``: starts one process a rank (or joins torchrun's); ``session``: a rank made ready.
- ``routing``: experts chosen evenly; ``trace``, ``stages``: where the time of a batch goes.
- ``prefill``, ``decode``: the measurements; ``report``, ``machine``: what is written about them.

The model, its batches, its KV pool and its runner are the engine's own. Needs torch, and no Ray.
"""
