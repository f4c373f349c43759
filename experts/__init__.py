"""Plans of where experts stand, traces of their load, and its simulation: numpy, no torch."""
