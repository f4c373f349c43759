"""The layers that the model page is written in; parallelism lives here, not in the model."""
