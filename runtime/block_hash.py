"""Identity of KV blocks for reuse: a chained hash of the tokens that fill them.

The hash of a block covers its own tokens and, through its parent's hash, every token before it, so
two blocks with equal hashes hold the same KV wherever they live. Prefill, decode and the router's
index compute the same values: only whole blocks have a hash, tokens are hashed as little-endian
uint32, and the first block's parent is the hash of the salt (tenants with different salts share
nothing). This module hashes; who holds which block is the business of the block pool.
"""

import hashlib
import struct
from collections.abc import Sequence

DIGEST_SIZE = 16
"""Bytes of a block hash: 128 bits, so a collision by chance never happens."""


def root_hash(salt: str = "") -> bytes:
    """Return the parent of every first block: the 16-byte hash of `salt`."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_SIZE).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 16-byte hash of one whole block that follows the block hashed as `parent`.

    Args:
        parent: the hash of the block before, or `root_hash(salt)`.
        token_ids: the tokens of the block, each in [0, 2**32).
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_SIZE).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, *, salt: str = "") -> list[bytes]:
    """Return the hashes of the `len(token_ids) // block_size` whole blocks, first block first."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, salt=salt)
    return hashes


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, *, salt: str = ""
) -> int:
    """Append the hashes of the whole blocks that `hashes` lacks; return how many were appended.

    Args:
        hashes: hashes of the first `len(hashes)` blocks of `token_ids`; grows in place.
        token_ids: all tokens of the sequence from its start, the already hashed ones included.
        block_size: tokens per block.
        salt: must be the salt that `hashes` began with; it matters only while `hashes` is empty.
    """
    first = len(hashes)
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(first * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return len(hashes) - first


def max_cached_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt may come from a prefix cache.

    At least the last prompt token must be computed, because its logits give the first output
    token: a prompt that is cached as a whole would have nothing left to run.
    """
    return max(num_prompt_tokens - 1, 0) // block_size
