"""Failures of cluster control that a person reads: one message, no traceback."""

from __future__ import annotations


class ClusterError(Exception):
    """Something about the cluster failed; the message says what, and what to do."""


class ProcessDiedError(ClusterError):
    """A process ended while it was starting; the message has its log's end."""


class WrongArgumentError(ClusterError):
    """A name or a setting that cannot be; nothing was changed."""


class RefusedError(ClusterError):
    """What was asked for cannot be now, or would break something; nothing was changed."""
