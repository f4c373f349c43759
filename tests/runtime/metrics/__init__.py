"""Tests of runtime.metrics."""
