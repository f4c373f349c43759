"""Tests of engine.ops."""
