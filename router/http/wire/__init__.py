"""Connections, bodies and answers as bytes: whole ones, and events that follow one another."""
