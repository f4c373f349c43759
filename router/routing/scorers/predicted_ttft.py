"""The pair that should answer first, by measured speeds and who holds which blocks."""

from __future__ import annotations

from router.pool.view import Candidate
from router.routing.estimate import estimate_pair
from router.routing.request_shape import RequestShape
from router.routing.scorers.least_loaded import LeastLoaded

STEP_S = 0.001
"""Of a token's time that one more request of a decode rank is taken to cost: among pairs that
answer as soon, the emptier rank is picked."""


class PredictedTTFT:
    """Seconds until the first token (`router.routing.estimate`); decode's load breaks ties."""

    separable = False
    by_prefix = True

    def __init__(self) -> None:
        self._loads = LeastLoaded()

    def prefill_cost(self, prefill: Candidate) -> float:
        """Its queue, in seconds."""
        return prefill.queue_s

    def decode_cost(self, decode: Candidate) -> float:
        """Requests and blocks in use."""
        return self._loads.decode_cost(decode)

    def decode_room(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_room(decode)

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The predicted time."""
        ttft_s = estimate_pair(prefill, decode, shape).ttft_s
        return ttft_s + STEP_S * self._loads.decode_cost(decode)
