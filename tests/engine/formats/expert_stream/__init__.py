"""Tests of engine.formats.expert_stream."""
