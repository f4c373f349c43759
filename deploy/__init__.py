"""Cluster control: the ``tandem`` command, its Ray actors, and what they start, watch and stop.

The only package that knows Ray, and the only one that may import all the others.
"""
