"""Tests of engine.weights."""
