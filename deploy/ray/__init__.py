"""Ray, where ranks of several hosts are started by it."""
