"""Tests of grammar."""
