"""What the router counts, of itself, of each model and of ranks."""
