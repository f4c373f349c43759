"""What a person sees of a cluster: its state, its display, its logs."""
