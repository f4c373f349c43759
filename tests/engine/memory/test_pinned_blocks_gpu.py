"""Blocks of a GPU come back byte for byte through pinned memory, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.memory.pinned_blocks import PinnedBlocks
from engine.streams import Streams
from runtime.errors import InternalError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_in_other_places(dtype: torch.dtype) -> None:
    pool = KVPool(12, 5, 64, KVSpec.shared(576), dtype=dtype, device="cuda")
    pool.data.view(torch.uint8).random_(0, 256)
    pinned = PinnedBlocks(pool, 6, Streams(pool.device))
    before = pool.data.view(torch.uint8)[[5, 6, 2, 9]].clone()
    copy = pinned.copy_out([5, 6, 2, 9])
    copy.done.synchronize()
    assert pinned.is_done(copy)
    pool.data.view(torch.uint8)[[5, 6, 2, 9]] = 0
    pinned.copy_in([1, 11, 3, 4], copy)
    assert torch.equal(pool.data.view(torch.uint8)[[1, 11, 3, 4]], before)
    pinned.discard(copy)
    assert len(pinned.copy_out([1] * 6).places) == 6
    with pytest.raises(InternalError, match="pinned places"):
        pinned.copy_out([1])


def test_a_copy_starts_behind_what_was_launched_and_nobody_waits_for_it() -> None:
    pool = KVPool(33, 61, 64, KVSpec.shared(576), dtype=torch.bfloat16, device="cuda")
    pinned = PinnedBlocks(pool, 32, Streams(pool.device))
    torch.cuda._sleep(200_000_000)  # about 0.1 s on the current stream
    pool.data.fill_(3.0)
    copy = pinned.copy_out(list(range(1, 33)))
    assert not pinned.is_done(copy)
    copy.done.synchronize()
    pool.data.zero_()
    pinned.copy_in(list(range(1, 33)), copy)
    assert bool((pool.data[1:] == 3.0).all())
