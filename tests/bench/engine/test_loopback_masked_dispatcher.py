"""The dispatcher of a rank alone that does the work of one of many."""

import torch

from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from engine.kernels.masked_rows import MaskedRoom
from engine.kernels.portable import portable_kernels
from engine.kernels.reference import quantize_rows
from engine.parallel.pending import Ready
from tests.engine.parallel.expert_world import HIDDEN, TOP_K

KERNELS = portable_kernels(has_fp8=True)


def test_loopback_leaves_padding_where_it_is() -> None:
    dispatcher = LoopbackMaskedDispatcher(KERNELS, 4, num_ranks=8)
    hidden = torch.randn(3, HIDDEN).bfloat16()
    ids, weights = torch.tensor([[9, 2], [-1, -1], [4, -1]]), torch.full((3, 2), torch.nan)
    weights[ids >= 0] = 1.0
    rows, handle = dispatcher.start_dispatch(quantize_rows(hidden), ids, weights).wait()
    assert rows.num_rows_L.tolist() == [1, 1, 1, 0]  # of 4, 9 and 2
    out = dispatcher.start_combine(torch.ones(4, 128, HIDDEN).bfloat16(), handle, None).wait()
    assert out[:, 0].tolist() == [2.0, 0.0, 1.0]


def test_loopback_carries_the_load_of_one_of_eight() -> None:
    num_tokens, num_local = 128, 32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    scores = torch.rand(num_tokens, 256, generator=generator)
    weights, ids = scores.topk(TOP_K, dim=-1)
    dispatcher = LoopbackMaskedDispatcher(KERNELS, num_local, num_ranks=8)
    rows, handle = dispatcher.start_dispatch(quantize_rows(hidden), ids, weights).wait()
    assert rows.data_LMD.shape == (num_local, 1024, HIDDEN)
    assert int(rows.num_rows_L.sum()) == num_tokens * TOP_K
    assert rows.expected_rows == 32
    factors = torch.arange(1.0, num_local + 1).view(-1, 1, 1)
    data = rows.data_LMD.float() * rows.scale_LMG.repeat_interleave(128, 2) * factors
    own = torch.ones(num_tokens, HIDDEN).bfloat16()
    out = dispatcher.start_combine(data.bfloat16(), handle, Ready(own)).wait()
    expected = hidden.float() * ((ids % num_local + 1) * weights).sum(1, keepdim=True) + 1
    torch.testing.assert_close(out.float(), expected, rtol=0.08, atol=2.0)


def test_loopback_leaves_padding_out() -> None:
    ids = torch.tensor([[7, 33, 64], [-1, -1, -1]])
    dispatcher = LoopbackMaskedDispatcher(KERNELS, 32, num_ranks=8)
    hidden = torch.tensor([1.0, torch.nan]).unsqueeze(1).expand(2, HIDDEN).bfloat16()
    rows, _ = dispatcher.start_dispatch(quantize_rows(hidden), ids, torch.ones(2, 3)).wait()
    assert rows.num_rows_L.nonzero().flatten().tolist() == [0, 1, 7]
    assert rows.num_rows_L.max() == 1


def test_loopback_expects_its_share_and_has_room_for_all_ranks() -> None:
    dispatcher = LoopbackMaskedDispatcher(KERNELS, 32, num_ranks=8)
    for num_tokens, expected in ((128, 32), (64, 16), (10, 3), (0, 1)):
        room = dispatcher.masked_room(num_tokens, 8)
        assert room.expected_rows == expected
        assert 8 * num_tokens <= room.max_rows <= 1024
    assert dispatcher.masked_room(1, 8) == MaskedRoom(128, 1)
