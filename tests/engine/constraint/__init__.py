"""Tests of engine.constraint."""
