"""Tests of engine.experts."""
