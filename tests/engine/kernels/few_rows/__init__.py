"""Tests of engine.kernels.triton_gemm."""
