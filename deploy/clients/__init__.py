"""Clients of a router and of its experts' recordings."""
