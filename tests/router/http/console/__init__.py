"""The console: its numbers, its endpoints, the page in a browser."""
