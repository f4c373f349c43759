"""Calls between processes: gRPC, calls of our own on one socket, registration and what is said."""
