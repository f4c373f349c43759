"""Processes that tests start: forked from one that has imported what they import."""
