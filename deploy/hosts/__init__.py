"""Hosts: what they have free, what runs on each, and how they are."""
