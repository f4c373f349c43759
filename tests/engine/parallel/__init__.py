"""Tests of engine.parallel."""
