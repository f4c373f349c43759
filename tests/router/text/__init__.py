"""Tests of router/text."""
