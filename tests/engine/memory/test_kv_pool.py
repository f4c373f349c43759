"""The KV pool: page-major layout, copies out and in; rows that go into a layer by their slots."""

import torch

from engine.attention.kv_spec import KVSpec
from engine.attention.latent_storage import put_rows
from engine.memory.kv_pool import KVPool


def make_pool() -> KVPool:
    return KVPool(num_blocks=5, num_layers=3, block_size=4, kv_spec=KVSpec.shared(6))


def test_a_block_of_all_layers_is_contiguous() -> None:
    pool = make_pool()
    assert pool.data.is_contiguous()
    assert pool.block_bytes == 3 * 4 * 6 * 4
    assert pool.nbytes == 5 * pool.block_bytes
    assert pool.data[2].data_ptr() == pool.address + 2 * pool.block_bytes
    assert not pool.data.any()


def test_rows_go_into_the_slots_of_one_layer() -> None:
    pool = make_pool()
    slots = torch.tensor([4 * 3 + 1, 4 * 1 + 3])
    rows = torch.tensor([[0.0, 1, 2, 3, -1, -2], [4, 5, 6, 7, -3, -4]])
    put_rows(pool.layer(1), slots, rows)
    layer = pool.layer(1)
    assert layer[3, 1].tolist() == [0, 1, 2, 3, -1, -2]
    assert layer[1, 3].tolist() == [4, 5, 6, 7, -3, -4]
    pool.layer(1)[3, 1] = 0
    pool.layer(1)[1, 3] = 0
    assert not pool.data.any()


def test_rows_are_converted_to_the_dtype_of_the_pool() -> None:
    pool = KVPool(2, 1, 4, KVSpec.shared(6), dtype=torch.bfloat16)
    put_rows(pool.layer(0), torch.tensor([5]), torch.full((1, 6), 1.00390625))
    assert pool.layer(0)[1, 1, 0].item() == 1.0


def test_copies_survive_in_other_blocks() -> None:
    pool = make_pool()
    pool.data.copy_(torch.rand_like(pool.data))
    saved = pool.copy_out([3, 1])
    assert torch.equal(saved[0], pool.data[3])
    pool.data.zero_()
    pool.copy_in([2, 4], saved)
    assert torch.equal(pool.data[2], saved[0])
    assert torch.equal(pool.data[4], saved[1])
    assert not pool.data[[0, 1, 3]].any()


def test_copying_no_blocks_is_allowed() -> None:
    pool = make_pool()
    saved = pool.copy_out([])
    assert saved.shape == (0, 3, 4, 6)
    pool.copy_in([], saved)


def test_a_pool_in_e4m3_is_written_and_copied_alike() -> None:
    pool = KVPool(4, 2, 4, KVSpec.shared(6), dtype=torch.float8_e4m3fn)
    latents = torch.tensor([[1.0, -2.0, 0.5, 1e6], [3.0, 0.0, -448.0, 16.0]])
    rows = torch.cat((latents, torch.ones(2, 2)), dim=1)
    put_rows(pool.layer(1), torch.tensor([4, 11]), rows)
    copied = pool.copy_out([1, 2])
    pool.data.view(torch.uint8).zero_()
    pool.copy_in([3, 1], copied)
    assert pool.layer(1)[3, 0].float().tolist() == [1.0, -2.0, 0.5, 448.0, 1.0, 1.0]
    assert pool.layer(1)[1, 3].float().tolist() == [3.0, 0.0, -448.0, 16.0, 1.0, 1.0]
    assert pool.block_bytes == 2 * 4 * 6
