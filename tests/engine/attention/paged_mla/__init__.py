"""Tests of engine.attention.paged_mla."""
