"""Block hashes: chained, whole blocks only, the same however they are grown."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.block_hash import (
    DIGEST_SIZE,
    extend_hashes,
    hash_block,
    hash_blocks,
    max_cached_blocks,
    root_hash,
)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
block_sizes = st.integers(1, 8)


@given(token_lists, block_sizes)
def test_only_whole_blocks_are_hashed(token_ids: list[int], block_size: int) -> None:
    hashes = hash_blocks(token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(block_hash) == DIGEST_SIZE for block_hash in hashes)
    assert len(set(hashes)) == len(hashes)


@given(token_lists, token_lists, block_sizes)
def test_equal_hashes_mean_equal_prefixes(
    first: list[int], second: list[int], block_size: int
) -> None:
    pairs = zip(hash_blocks(first, block_size), hash_blocks(second, block_size), strict=False)
    for index, (one, other) in enumerate(pairs):
        end = (index + 1) * block_size
        assert (one == other) == (first[:end] == second[:end])


@given(token_lists, block_sizes, st.integers(0, 40))
def test_growing_gives_the_same_hashes(token_ids: list[int], block_size: int, cut: int) -> None:
    hashes = hash_blocks(token_ids[:cut], block_size, salt="tenant")
    before = len(hashes)
    assert extend_hashes(hashes, token_ids, block_size, salt="tenant") == len(hashes) - before
    assert hashes == hash_blocks(token_ids, block_size, salt="tenant")


def test_salt_separates() -> None:
    tokens = list(range(8))
    plain, salted = hash_blocks(tokens, 4), hash_blocks(tokens, 4, salt="tenant")
    assert not set(plain) & set(salted)


def test_hash_is_defined_by_bytes() -> None:
    expected = hashlib.blake2b(root_hash() + struct.pack("<2I", 7, 9), digest_size=16).digest()
    assert hash_block(root_hash(), [7, 9]) == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "expected"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)]
)
def test_the_last_prompt_token_is_never_cached(num_prompt_tokens: int, expected: int) -> None:
    assert max_cached_blocks(num_prompt_tokens, 4) == expected
