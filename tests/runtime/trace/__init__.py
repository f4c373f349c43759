"""Tests of runtime.trace."""
