"""Absorbed attention to the pages of a KV pool, in Triton: any GPU from Ampere on, Q >= 1.

- ``tiles``: how the work is cut, by kind of GPU and number of rows; pure arithmetic.
- ``parts``: which programs attend to which pages; from lengths on the device, or on the host.
- ``kernel``: what is compiled, for any of them. ``attention``: chooses and launches.
- ``hopper_kernel``, ``hopper_e4m3``: the same for Hopper's tensor cores and copy engine, in Gluon;
  ``hopper_pieces``: what both share. ``hopper_attention``: launches them.
"""
