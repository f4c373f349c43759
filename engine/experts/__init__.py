"""Experts: in which slots they stand, and why there."""
