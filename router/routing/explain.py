"""Why this pair, and why no more of the context was found: for whoever asks by a header.

A tenant learns nothing of others by it: "other salt" is said only where the same context is cached
without a salt, which anybody could find out by sending it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixIndex, PrefixMatch
from router.routing.estimate import PairEstimate
from router.routing.request_shape import RequestShape
from runtime.block_hash import hash_block, max_cached_blocks, root_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Of one pick. Blocks are leading whole blocks of the context.

    Attributes:
        policy: that picked.
        binding: of the conversation: "none", "kept", "overloaded", "gone".
        estimate: of the pair.
        num_blocks: of the context, that a cache could give.
        best_prefill: the prefill worker that holds most, and how much.
        best_decode: the same of decode ranks.
        miss: why the picked prefill worker has no more of it; empty: it has all.
    """

    policy: str
    binding: str
    estimate: PairEstimate
    num_blocks: int
    best_prefill: tuple[str, int]
    best_decode: tuple[str, int]
    miss: str

    def as_json(self) -> dict[str, object]:
        """Times in seconds."""
        estimate = self.estimate
        return {
            "policy": self.policy,
            "conversation": self.binding,
            "predicted_ttft_s": round(estimate.ttft_s, 6),
            "queue_s": round(estimate.queue_s, 6),
            "compute_s": round(estimate.compute_s, 6),
            "transfer_s": round(estimate.transfer_s, 6),
            "room_s": round(estimate.room_s, 6),
            "blocks": self.num_blocks,
            "prefill_blocks": estimate.prefill_blocks,
            "decode_blocks": estimate.decode_blocks,
            "best_prefill": self.best_prefill[0],
            "best_prefill_blocks": self.best_prefill[1],
            "best_decode": self.best_decode[0],
            "best_decode_blocks": self.best_decode[1],
            "miss": self.miss,
        }


def best_of(match: PrefixMatch, keys: Sequence[WorkerKey]) -> tuple[str, int]:
    """Who of ``keys`` holds most of a context, and how much; nobody: an empty name."""
    best = max(keys, key=match.num_blocks, default=None)
    num_blocks = match.num_blocks(best) if best is not None else 0
    return (str(best), num_blocks) if num_blocks else ("", 0)


def why_no_more(
    num_found: int, num_elsewhere: int, shape: RequestShape, index: PrefixIndex, block_size: int
) -> str:
    """Why a prefill worker holds ``num_found`` leading blocks of a context and not more.

    Args:
        num_found: of the one that was picked.
        num_elsewhere: of the one that holds most.
        shape: the request.
        index: as of the pick.
        block_size: tokens.
    """
    hashes = shape.block_hashes
    num_blocks = max_cached_blocks(shape.num_context_tokens, block_size) if block_size else 0
    if num_found >= num_blocks:
        return ""
    if num_elsewhere > num_found:
        return "other rank chosen"
    if index.was_evicted(hashes[num_found]):
        return f"evicted: block {num_found}"
    if num_found:
        return f"tokens differ at block {num_found}"
    if shape.cache_salt and _without_salt(shape, block_size) in index:
        return "other salt"
    return "never seen"


def _without_salt(shape: RequestShape, block_size: int) -> bytes:
    return hash_block(root_hash(), shape.first_tokens[:block_size])
