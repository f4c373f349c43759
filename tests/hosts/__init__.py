"""Whole clusters over several hosts, each a network namespace of this machine."""
