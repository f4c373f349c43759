"""Tests of router/pool."""
