"""Tests of cluster control."""
