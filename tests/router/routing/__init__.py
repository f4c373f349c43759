"""Tests of router/routing."""
