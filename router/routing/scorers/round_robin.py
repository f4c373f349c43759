"""All workers alike."""

from __future__ import annotations

import math

from router.pool.view import Candidate
from router.routing.request_shape import RequestShape


class RoundRobin:
    """All alike: the picker alone decides."""

    separable = True
    by_prefix = False

    def prefill_cost(self, prefill: Candidate) -> float:
        """None."""
        return 0.0

    def decode_cost(self, decode: Candidate) -> float:
        """None."""
        return 0.0

    def decode_room(self, decode: Candidate) -> float:
        """Not asked for."""
        return math.inf

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """None."""
        return 0.0
