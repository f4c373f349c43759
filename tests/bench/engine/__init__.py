"""Tests of bench.engine."""
