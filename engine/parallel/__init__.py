"""How ranks share the work: dimensions, process groups, token dispatchers."""
