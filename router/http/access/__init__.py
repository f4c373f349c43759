"""Who may ask, how much, and in which tier."""
