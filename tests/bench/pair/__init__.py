"""Tests of ``tandem bench pair``."""
