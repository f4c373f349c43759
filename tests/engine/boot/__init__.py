"""Tests of engine.boot."""
