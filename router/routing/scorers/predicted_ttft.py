"""The pair that should answer first, by measured speeds and who holds which blocks.

And what the pick costs those who come after. A worker that works a share rho of the time and gets c
seconds more to do needs c / (1 - rho) seconds until it has caught up (the delay busy period of an
M/G/1 queue), so others bring it c rho / (1 - rho) seconds of work that has to wait behind this one.
Without it who has a prefix that many share gets all who share it, their later turns included, up to
where a queue shows; with it a short match is given up for a worker that works less, and a long one,
which leaves little to compute, is not.
"""

from __future__ import annotations

from router.pool.view import Candidate
from router.routing.estimate import estimate_pair
from router.routing.request_shape import RequestShape
from router.routing.scorers.least_loaded import TOKENS_PER_REQUEST, LeastLoaded

MOST_BUSY = 0.95
"""A worker that never rests counts as this: its share is of the last seconds, and may not last."""
STEP_S = 0.001
"""Of a token's time that one more request of a decode rank is taken to cost: among pairs that
answer as soon, the emptier rank is picked."""


class PredictedTTFT:
    """Seconds until the first token, and what others wait for it; decode's load breaks ties."""

    separable = False
    by_prefix = True

    def __init__(self) -> None:
        self._loads = LeastLoaded()

    def prefill_cost(self, prefill: Candidate) -> float:
        """Its queue, in seconds, and what a request of 1,024 tokens would cost others there."""
        compute_s = TOKENS_PER_REQUEST / prefill.tokens_per_s
        return prefill.queue_s + delay_of_others_s(prefill, compute_s)

    def decode_cost(self, decode: Candidate) -> float:
        """Requests and blocks in use."""
        return self._loads.decode_cost(decode)

    def decode_room(self, decode: Candidate) -> float:
        """As of "least-loaded"."""
        return self._loads.decode_room(decode)

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The predicted time, what others wait for it, and decode's load."""
        estimate = estimate_pair(prefill, decode, shape)
        others_s = delay_of_others_s(prefill, estimate.compute_s)
        return estimate.ttft_s + others_s + STEP_S * self._loads.decode_cost(decode)


def delay_of_others_s(prefill: Candidate, compute_s: float) -> float:
    """Work of others that waits behind so many seconds of it; see the module."""
    busy = min(prefill.busy_share, MOST_BUSY)
    return compute_s * busy / (1.0 - busy)
