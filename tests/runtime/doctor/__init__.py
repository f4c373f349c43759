"""Tests of `runtime.doctor`."""
