"""Tests of engine.kernels.expert_stream."""
