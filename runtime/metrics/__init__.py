"""What processes count, and how it is exported: Prometheus text, names of vLLM beside our own."""
