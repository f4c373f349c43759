"""Tests of runtime.net."""
