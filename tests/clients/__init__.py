"""Others' clients against a running cluster."""
