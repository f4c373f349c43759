"""The detour of a slow link is compiled for a Hopper GPU: it stores, then says so. Needs no GPU."""

import importlib
import os

import pytest
import torch

from engine.formats.triton_gemm.limits import HOPPER
from engine.parallel.nvlink.shape import LINE, UNITS, NvlinkShape
from tests.engine.elsewhere import compiling_only

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_detour(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    slow_link = importlib.import_module("bench.ranks.slow_link")
    shape = NvlinkShape(
        num_ranks=4, num_experts=128, max_tokens_per_rank=128, hidden_size=7168, top_k=8
    )
    words = torch.zeros(4, dtype=torch.int64)
    with compiling_only(monkeypatch, HOPPER.sm) as compiled:
        for runs in (slow_link._rows_of(shape, rank), slow_link._sums_of(shape, rank)):
            slow_link._forward[(slow_link.PARTS,)](
                *(words.view(torch.uint8), words, words, 20_000, rank, 1, *runs),
                HALVES=shape.halves,
                HALF=shape.half_bytes,
                LINE=LINE,
                UNITS=UNITS,
                PARTS=slow_link.PARTS,
                BLOCK=4096,
                num_warps=8,
            )
    for _, kernel in compiled:
        ptx = kernel.asm["ptx"]
        signal = ptx.index("atom.global.sys.release.add")
        assert ptx.rindex("st.global") < ptx.rindex("bar.sync") < signal
        assert "%globaltimer" in ptx


def test_runs_are_those_of_the_rank_and_inside_the_half() -> None:
    slow_link = pytest.importorskip("bench.ranks.slow_link")
    shape = NvlinkShape(
        num_ranks=4, num_experts=128, max_tokens_per_rank=128, hidden_size=7168, top_k=8
    )
    ends = set()
    for rank in range(4):
        tally, _, route, _, row, count = slow_link._rows_of(shape, rank)
        assert 4 * tally == 4 * rank * (shape.num_local_experts + 1)
        assert 4 * route == shape.routes + rank * 128 * 8 * shape.top_k
        assert 4 * row == shape.rows + rank * 128 * shape.row_bytes
        ends.add(4 * (row + count))
        first, words, *rest = slow_link._sums_of(shape, rank)
        assert (4 * first, 4 * words) == (rank * 128 * 2 * 7168, 128 * 2 * 7168)
        assert rest == [0, 0, 0, 0]
    assert max(ends) <= shape.half_bytes
