"""Tests of the fixed-shape decode steps."""
