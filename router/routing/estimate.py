"""When a pair would answer a request: the time to its first token, in parts.

    ttft = queue + compute + transfer + room

- queue: tokens that wait at prefill and are computed before a prompt of the request's tier / its
  measured tokens per second.
- compute: tokens of the context that prefill's cache does not have / the same.
- transfer: KV that decode's cache does not have / measured bytes per second of that path, as far as
  it is not hidden behind compute: blocks travel as they are completed. The client has the first
  token before that ends, and waits for it then for the second one.
- room: where decode has none, requests that wait there before this one / requests that end there
  per second.

What was not measured at a worker is taken from the others of its role (`router.pool.rates`).
"""

from __future__ import annotations

from typing import NamedTuple

from router.pool.view import Candidate
from router.routing.request_shape import RequestShape
from runtime.block_hash import max_cached_blocks


class PairEstimate(NamedTuple):
    """Of one pair for one request; seconds."""

    queue_s: float
    compute_s: float
    transfer_s: float
    room_s: float
    prefill_blocks: int
    """Leading blocks of the context that the prefill worker has."""
    decode_blocks: int
    num_new_tokens: int
    """Of the context, that prefill has to compute."""

    @property
    def ttft_s(self) -> float:
        """The sum."""
        return self.queue_s + self.compute_s + self.transfer_s + self.room_s


class PrefillEstimate(NamedTuple):
    """The parts that are prefill's."""

    queue_s: float
    compute_s: float
    num_blocks: int
    num_new_tokens: int


def estimate_prefill(prefill: Candidate, shape: RequestShape) -> PrefillEstimate:
    """What the prefill side takes."""
    num_tokens = shape.num_context_tokens
    num_blocks, block_size = 0, prefill.member.block_size
    if block_size:
        most = max_cached_blocks(num_tokens, block_size)
        num_blocks = min(shape.match.num_blocks(prefill.member.key), most)
    num_new = num_tokens - num_blocks * block_size
    queue_s = prefill.queue_ahead_s(shape.tier_order)
    return PrefillEstimate(queue_s, num_new / prefill.tokens_per_s, num_blocks, num_new)


def estimate_room_s(decode: Candidate, shape: RequestShape) -> float:
    """How long decode lets a request wait for blocks; 0 where it has room, or does not say."""
    report, member = decode.load.report, decode.member
    is_full = 0 < member.max_num_requests <= decode.num_requests
    if not report.num_total_blocks or not member.block_size:
        lacks = False
    else:
        lacks = report.num_free_blocks * member.block_size < shape.num_tokens_needed
    if not (is_full or lacks or report.num_requests_blocked):
        return 0.0
    return (1 + report.num_requests_blocked) / decode.requests_per_s


def estimate_pair(prefill: Candidate, decode: Candidate, shape: RequestShape) -> PairEstimate:
    """All parts."""
    ours = estimate_prefill(prefill, shape)
    member = decode.member
    num_blocks, transfer_s = 0, 0.0
    if member.block_size:
        num_blocks = shape.match.num_blocks(member.key)
        total = -(-shape.num_context_tokens // member.block_size)
        num_bytes = max(0, total - num_blocks) * member.kv_block_bytes
        if num_bytes:
            wire_s = num_bytes / decode.received_per_s(prefill.member)
            transfer_s = max(0.0, wire_s - ours.compute_s)
    return PairEstimate(
        ours.queue_s,
        ours.compute_s,
        transfer_s,
        estimate_room_s(decode, shape),
        ours.num_blocks,
        num_blocks,
        ours.num_new_tokens,
    )
