"""Targets of fuzzing by coverage: every parser of bytes that come from outside or from a peer."""
