"""Tests of runtime.stragglers."""
