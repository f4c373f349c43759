"""Tests of engine.layers."""
