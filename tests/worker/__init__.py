"""Tests of what both roles' workers are made of."""
