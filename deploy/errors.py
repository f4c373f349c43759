"""Failures of cluster control that a person reads: one message, no traceback."""

from __future__ import annotations


class ClusterError(Exception):
    """Something about the cluster failed; the message says what, and what to do."""


class ProcessDiedError(ClusterError):
    """A process ended while the cluster was starting; the message has its log's end."""
