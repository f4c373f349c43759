"""Tests of runtime.rpc."""
