"""Steps with fixed shapes, captured once per size, then replayed: of decode, and short prefill."""
