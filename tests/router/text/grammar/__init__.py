"""Tests of router/text/grammar."""
