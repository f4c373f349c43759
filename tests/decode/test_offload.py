"""Preempted KV comes back byte for byte, and the host store keeps its bound."""

from __future__ import annotations

import pytest
import torch

from decode.offload import HostBlockStore
from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from runtime.errors import InternalError


def make_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    pool = KVPool(9, 3, 4, KVSpec.shared(6), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_restored_exactly_into_other_blocks(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    store = HostBlockStore(pool, max_blocks=4)
    before = pool.data[[5, 2, 7]].clone()
    store.save("a", [5, 2, 7])
    assert store.num_blocks == 3
    pool.data[[5, 2, 7]] = 0  # the blocks get other owners
    store.restore("a", [1, 8, 3])
    assert torch.equal(pool.data[[1, 8, 3]].view(torch.uint8), before.view(torch.uint8))
    assert store.num_blocks == 0
    store.check_integrity()


def test_the_bound_holds() -> None:
    store = HostBlockStore(make_pool(), max_blocks=3)
    store.save("a", [1, 2])
    assert store.can_hold(1)
    assert not store.can_hold(2)
    with pytest.raises(InternalError, match="do not fit into host memory"):
        store.save("b", [3, 4])
    with pytest.raises(InternalError, match="offloaded already"):
        store.save("a", [3])
    store.drop("a")
    assert store.can_hold(3)
    store.check_integrity()


def test_a_restore_of_another_size_is_refused() -> None:
    store = HostBlockStore(make_pool(), max_blocks=3)
    store.save("a", [1, 2])
    with pytest.raises(InternalError, match="2 blocks were offloaded, 1 are to be restored"):
        store.restore("a", [1])
