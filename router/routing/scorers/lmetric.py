"""LMetric: tokens that a prefill worker would have to compute, times its requests; no knob.

The product of arXiv 2603.15202. Tokens are those that wait there and the request's own that the
cache does not have, so that a whole hit does not make a long queue look empty.
"""

from __future__ import annotations

from router.pool.view import Candidate
from router.routing.estimate import estimate_prefill
from router.routing.request_shape import RequestShape
from router.routing.scorers.least_loaded import LeastLoaded

DECODE_WEIGHT = 1e-3
"""Decode's cost is a tie-break: the product says nothing of that side."""


class LMetric:
    """Uncached tokens times requests."""

    separable = False
    by_prefix = True

    def __init__(self) -> None:
        self._loads = LeastLoaded()

    def prefill_cost(self, prefill: Candidate) -> float:
        """The product without a request."""
        return prefill.load.num_tokens_left * (prefill.num_requests + 1.0)

    def decode_cost(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_cost(decode)

    def decode_room(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_room(decode)

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The product, with the request."""
        num_new = estimate_prefill(prefill, shape).num_new_tokens
        num_tokens = prefill.load.num_tokens_left + num_new
        product = num_tokens * (prefill.num_requests + 1.0)
        return product + DECODE_WEIGHT * self._loads.decode_cost(decode)
