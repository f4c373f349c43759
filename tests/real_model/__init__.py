"""A real model of 135 million weights, against transformers."""
