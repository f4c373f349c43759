"""Short steps in the masked layout give the sums of the contiguous one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.formats.base import run_experts
from engine.formats.expert_rows import AlignedRows
from engine.formats.stored_weight import StoredWeight
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.portable import portable_kernels
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.pending import Ready
from engine.parallel.row_formats import AlignedQuantized, ExpertShare
from engine.parallel.short_rows import MOST_EXPECTED_ROWS, ShortQuantized
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.parallel.fake_ranks import SilentGroup

NUM_EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 256, 128
KERNELS = portable_kernels(has_fp8=True)
FORMAT = fp8_of(KERNELS)


def rows_of(share: ExpertShare, max_tokens: int) -> tuple[AlignedQuantized, ShortQuantized]:
    codec = FORMAT.rows
    assert codec is not None
    aligned = AlignedQuantized(KERNELS.ops, codec, share)
    return aligned, ShortQuantized(ops=KERNELS.ops, aligned=aligned, max_tokens=max_tokens)


def weights_of(seed: int, share: ExpertShare) -> tuple[StoredWeight, StoredWeight]:
    generator = torch.Generator().manual_seed(seed)
    stored = []
    for rows, columns in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)):
        shape = NUM_EXPERTS, rows, columns
        data = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        scale = 0.05 + torch.rand(NUM_EXPERTS, rows // 128, columns // 128, generator=generator)
        mine = slice(share.first, share.first + share.num_local)
        stored.append(StoredWeight(data[mine].contiguous(), scale[mine].contiguous() / 16))
    return stored[0], stored[1]


def draw(seed: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    scores = torch.rand(num_tokens, NUM_EXPERTS, generator=generator)
    ids = scores.topk(TOP_K, dim=-1).indices
    ids[torch.rand(num_tokens, TOP_K, generator=generator) < 0.1] = -1
    return hidden, ids, torch.rand(num_tokens, TOP_K, generator=generator)


def run(
    dispatcher: Any, seed: int, num_tokens: int, share: ExpertShare, *, with_own: bool
) -> tuple[Tensor, type]:
    hidden, ids, weights = draw(seed, num_tokens)
    generator = torch.Generator().manual_seed(seed + 1)
    own = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16() if with_own else None
    feed = quantize(KERNELS, hidden)
    rows, handle = dispatcher.start_dispatch(feed, ids, weights).wait()
    out = run_experts(FORMAT, rows, *weights_of(seed, share))
    summed = dispatcher.start_combine(out, handle, None if own is None else Ready(own)).wait()
    return summed, type(rows)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), num_tokens=st.integers(1, 40), with_own=st.booleans())
@pytest.mark.parametrize("kind", [LocalDispatcher, GatheredDispatcher])
@pytest.mark.parametrize(
    "share",
    [
        ExpertShare(first=0, num_local=8, num_ranks=1),
        ExpertShare(first=4, num_local=4, num_ranks=2),
    ],
)
def test_both_layouts_give_the_same_sums(
    kind: Any, share: ExpertShare, seed: int, num_tokens: int, with_own: bool
) -> None:
    group = RankGroup() if share.num_ranks == 1 else SilentGroup(rank=1, size=2)
    if kind is GatheredDispatcher and share.num_ranks > 1:
        group = RankGroup()
    aligned, short = (kind(rows, group) for rows in rows_of(share, max_tokens=64))
    expected, of_aligned = run(aligned, seed, num_tokens, share, with_own=with_own)
    actual, of_short = run(short, seed, num_tokens, share, with_own=with_own)
    assert (of_aligned, of_short) == (AlignedRows, MaskedRows)
    # Of the same numbers, in GEMMs of other shapes: the last bits of bfloat16 may differ.
    torch.testing.assert_close(actual.float(), expected.float(), rtol=2e-2, atol=2e-3)


def test_a_longer_step_keeps_its_layout() -> None:
    share = ExpertShare(first=0, num_local=NUM_EXPERTS, num_ranks=1)
    _, short = rows_of(share, max_tokens=32)
    dispatcher = LocalDispatcher(short, RankGroup())
    assert run(dispatcher, 1, 32, share, with_own=False)[1] is MaskedRows
    assert run(dispatcher, 1, 33, share, with_own=False)[1] is AlignedRows


@given(num_tokens=st.integers(1, 4096), max_tokens=st.integers(0, 4096))
def test_a_step_is_short_by_its_tokens_and_by_the_rows_of_an_expert(
    num_tokens: int, max_tokens: int
) -> None:
    share = ExpertShare(first=0, num_local=32, num_ranks=8)
    _, short = rows_of(share, max_tokens)
    expected = num_tokens <= max_tokens and num_tokens * 8 <= 256 * MOST_EXPECTED_ROWS
    assert short.is_short(num_tokens, 8) is expected
