"""Tests of router/requests."""
