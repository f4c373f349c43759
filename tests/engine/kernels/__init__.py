"""Tests of engine.kernels."""
