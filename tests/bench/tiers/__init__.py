"""Tests of `bench.tiers`."""
