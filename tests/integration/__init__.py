"""Whole clusters of real processes and sockets on this machine, without Ray."""
