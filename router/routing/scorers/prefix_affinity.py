"""The worker that holds most of the context, unless another one is much less loaded.

In requests, as "least-loaded": a prompt token that has to be computed weighs as much as one that
waits, so nothing has to be measured. A short match, as of a system prompt that all requests share,
counts for nothing.
"""

from __future__ import annotations

from router.pool.view import Candidate
from router.routing.estimate import estimate_prefill
from router.routing.request_shape import RequestShape
from router.routing.scorers.least_loaded import TOKENS_PER_REQUEST, LeastLoaded

MIN_MATCHED_TOKENS = 1024
"""Absolute: a share of the context would be small for whoever has a long prompt of his own."""


class PrefixAffinity:
    """Least loaded, less what is there already."""

    separable = False
    by_prefix = True

    def __init__(self) -> None:
        self._loads = LeastLoaded()

    def prefill_cost(self, prefill: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.prefill_cost(prefill)

    def decode_cost(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_cost(decode)

    def decode_room(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_room(decode)

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The sum of both loads, less the requests that the match is worth."""
        found = estimate_prefill(prefill, shape)
        matched = shape.num_context_tokens - found.num_new_tokens
        saved = matched / TOKENS_PER_REQUEST if matched >= MIN_MATCHED_TOKENS else 0.0
        return self._loads.score(prefill, decode, shape) - saved
