"""How costly a pair is for a request: lower is better.

What one side costs depends on its load only, and is weighed when that changes. A scorer whose score
is the sum of both costs is separable: each side is chosen alone. Any other is asked about pairs of
a short list, the cheapest of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from router.pool.view import Candidate
from router.routing.request_shape import RequestShape

TOKENS_PER_REQUEST = 1024
"""So many prompt tokens that wait for prefill weigh as much as one request."""


class PairScorer(Protocol):
    """One policy's idea of a good pair. Pure: it is asked again only when a load has changed."""

    @property
    def separable(self) -> bool:
        """Whether ``score`` is the sum of the two costs."""

    def prefill_cost(self, prefill: Candidate) -> float:
        """Of this side, whatever the request and the other side."""

    def decode_cost(self, decode: Candidate) -> float:
        """Of that side."""

    def decode_room(self, decode: Candidate) -> float:
        """Tokens that the rank can take at once; ranks with room for a request come first."""

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """Of the pair, for this request."""


class LeastLoaded:
    """Requests in hand, prompt tokens that wait, and how full the block pools are."""

    separable = True

    def prefill_cost(self, prefill: Candidate) -> float:
        """The queue in requests; the prompt itself takes every worker the same time."""
        tokens = prefill.num_tokens / TOKENS_PER_REQUEST
        return prefill.num_requests + tokens + _share_in_use(prefill) / 2

    def decode_cost(self, decode: Candidate) -> float:
        """Requests, and blocks in use, counted in requests of a size that fills the rank.

        A step reads all KV in use: few long contexts are as much work as many short ones.
        """
        return decode.num_requests + _share_in_use(decode) * max(1, decode.member.max_num_requests)

    def decode_room(self, decode: Candidate) -> float:
        """Free blocks, in tokens; none where requests wait or no further one is taken on."""
        report, member = decode.load.report, decode.member
        is_full = 0 < member.max_num_requests <= decode.num_requests
        if is_full or report.num_requests_waiting:
            return 0.0
        if not report.num_total_blocks or not member.block_size:
            return math.inf  # it does not say
        return report.num_free_blocks * member.block_size

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """The sum of both."""
        return self.prefill_cost(prefill) + self.decode_cost(decode)


class RoundRobin:
    """All alike: the picker alone decides."""

    separable = True

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


SCORERS: Mapping[str, PairScorer] = {"least-loaded": LeastLoaded(), "round-robin": RoundRobin()}
"""By the name in ``router.policy``."""


def _share_in_use(candidate: Candidate) -> float:
    report = candidate.load.report
    total = report.num_total_blocks
    return 1.0 - report.num_free_blocks / total if total else 0.0
