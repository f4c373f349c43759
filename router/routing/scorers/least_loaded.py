"""Requests in hand, prompt tokens that wait, and how full the block pools are."""

from __future__ import annotations

import math

from router.pool.view import Candidate
from router.routing.request_shape import RequestShape

TOKENS_PER_REQUEST = 1024
"""So many prompt tokens that wait for prefill weigh as much as one request."""


class LeastLoaded:
    """Requests in hand, prompt tokens that wait, and how full the block pools are."""

    separable = True
    by_prefix = False

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


def _share_in_use(candidate: Candidate) -> float:
    report = candidate.load.report
    total = report.num_total_blocks
    return 1.0 - report.num_free_blocks / total if total else 0.0
