"""Single kernels and layers, each checked against its reference and timed beside its rivals."""
