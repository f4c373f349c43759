"""Tests of engine.formats."""
