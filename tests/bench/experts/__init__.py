"""Tests of `bench.experts`."""
