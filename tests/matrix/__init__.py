"""A fault at a moment while a request with a feature is under way: every pair of the three."""
