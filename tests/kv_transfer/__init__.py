"""Tests of kv_transfer: real memory, real sockets, real processes."""
