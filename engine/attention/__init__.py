"""What attention is to everything outside a model: the numbers it keeps, and how it is called."""
