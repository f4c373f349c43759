"""Tests of what attention is to everything outside a model."""
