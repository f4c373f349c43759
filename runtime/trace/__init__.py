"""One id for a request in all processes, and the spans of it."""
