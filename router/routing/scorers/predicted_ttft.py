"""The pair that should answer first, by measured speeds and who holds which blocks."""

from __future__ import annotations

from router.pool.view import Candidate
from router.routing.estimate import estimate_pair
from router.routing.request_shape import RequestShape
from router.routing.scorers.least_loaded import LeastLoaded

BALANCE_S = 0.3
"""What a worker that works all the time costs more than one that is idle. Without it who has a
prefix that many share gets all who share it, their later turns included, up to where a queue shows;
with it a short match is given up for a worker that works less, and a long one is not."""
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
        """Its queue, in seconds, and how much it works."""
        return prefill.queue_s + BALANCE_S * prefill.busy_share

    def decode_cost(self, decode: Candidate) -> float:
        """Requests and blocks in use."""
        return self._loads.decode_cost(decode)

    def decode_room(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_room(decode)

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The predicted time, and what keeps workers alike."""
        ttft_s = estimate_pair(prefill, decode, shape).ttft_s + BALANCE_S * prefill.busy_share
        return ttft_s + STEP_S * self._loads.decode_cost(decode)
