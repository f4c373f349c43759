"""How ranks share the work: dimensions, process groups, expert placement, token dispatchers."""
