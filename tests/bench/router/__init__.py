"""Tests of bench.router."""
