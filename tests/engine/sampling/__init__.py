"""Tests of engine.sampling."""
