"""Decode steps with fixed shapes: captured once per batch size, then replayed."""
