"""Tests of tools.training."""
