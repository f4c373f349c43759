"""Tests of operations on a cluster that runs."""
