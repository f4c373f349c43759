"""Checkpoints: folders, the hub, shapes, and what is said of one."""
