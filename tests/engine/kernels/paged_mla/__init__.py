"""Tests of engine.kernels.paged_mla."""
