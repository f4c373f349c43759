"""Tests of engine.formats.triton_gemm."""
