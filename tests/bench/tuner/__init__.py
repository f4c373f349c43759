"""Tests of bench.tuner."""
