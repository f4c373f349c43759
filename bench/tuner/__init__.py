"""Measures which tiles of the Triton products are fastest on this GPU, for the shapes of a model.

- ``products``: the products of a model's layers on one rank, and the numbers of rows to measure.
- ``search``: which candidates are timed in the time there is; knows no device.
- ``inputs``: random operands of a product, and what some of its rows must come out as.
- ``bench``: compiles, checks and times tiles on the GPU. ``rival``: DeepGEMM on the same inputs.
- ``command``: ``tandem bench tune``.

Needs no cluster and no Ray.
"""
