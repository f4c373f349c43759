"""Tests of finding slow ranks among those that really run."""
