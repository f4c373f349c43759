"""What the kernels become on a Hopper GPU: wide stores, and an order that signals keep to.

Needs Triton and no GPU: its compiler is told which one to build for.
"""

import importlib
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.formats.fp8_rows import Fp8Rows
from engine.formats.triton_gemm.limits import HOPPER
from engine.parallel.nvlink.all_gather import GatherShape, Lane
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.nvlink.window import Window
from engine.parallel.pair_rows import PairRows
from tests.engine.elsewhere import compiling_only

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CPU = torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What was compiled, by the kernel's name."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    with compiling_only(monkeypatch, HOPPER.sm) as found:
        yield found


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(("num_ranks", "tokens"), [(8, 128), (2, 512), (3, 5)])
def test_kernels(
    num_ranks: int, tokens: int, records: bool, compiled: list[tuple[str, Any]]
) -> None:
    module = importlib.import_module("engine.parallel.nvlink.triton_exchange")
    shape = NvlinkShape(
        num_ranks=num_ranks,
        num_experts=32 * num_ranks,
        max_tokens_per_rank=tokens,
        hidden_size=7168,
        top_k=8,
    )
    window = Window.open(shape, 0, [0] * num_ranks, CPU, records=records)
    ids, weights = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8)
    exchange = module.TritonExchange(window)
    exchange.send_rows(Fp8Rows.empty(4, 7168, CPU), ids, weights)
    received = exchange.receive_rows(1)
    exchange.send_sums(torch.empty(received.rows.data_LMD.shape, dtype=torch.bfloat16), received)
    exchange.receive_sums(ids, torch.zeros(4, 7168, dtype=torch.bfloat16))
    assert len(compiled) == 4
    check_order(compiled, records=records)


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(8, 2048), (4, 16), (2, 4096)])
def test_sums(num_ranks: int, num_rows: int, compiled: list[tuple[str, Any]]) -> None:
    module = importlib.import_module("engine.parallel.nvlink.share_kernels")
    shape = ReduceShape(num_ranks=num_ranks, max_rows=num_rows, hidden_size=7168)
    sums = module.TritonSums(Window.open(shape, 0, [0] * num_ranks, CPU))
    part = torch.empty(num_ranks * num_rows, 7168, dtype=torch.bfloat16)
    sums.send(part)
    sums.receive(part, torch.zeros(num_rows, 7168, dtype=torch.bfloat16))
    sums.receive(part, None)
    assert len(compiled) == 3
    check_order(compiled, records=False)


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(8, 2048), (4, 16), (2, 4096)])
def test_sums_of_pairs(num_ranks: int, num_rows: int, compiled: list[tuple[str, Any]]) -> None:
    module = importlib.import_module("engine.parallel.nvlink.share_kernels")
    shape = ReduceShape(num_ranks=num_ranks, max_rows=num_rows, hidden_size=7168)
    sums = module.TritonSums(Window.open(shape, 0, [0] * num_ranks, CPU))
    pairs = PairRows(
        rows_MD=torch.empty(512, 7168, dtype=torch.bfloat16),
        places_PK=torch.empty(num_ranks * num_rows, 8, dtype=torch.int32),
        weights_PK=torch.empty(num_ranks * num_rows, 8),
        own_ids_TK=torch.empty(num_rows, 8, dtype=torch.int64),
        num_local_experts=32,
    )
    sums.send_pairs(pairs)
    sums.receive_pairs(pairs, torch.zeros(num_rows, 7168, dtype=torch.bfloat16))
    assert len(compiled) == 2
    check_order(compiled, records=False)


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(8, 2048), (4, 16), (2, 4096)])
def test_gathers(num_ranks: int, num_rows: int, compiled: list[tuple[str, Any]]) -> None:
    module = importlib.import_module("engine.parallel.nvlink.share_kernels")
    shape = GatherShape(num_ranks=num_ranks, max_rows=num_rows, row_bytes=4224)
    window = Window.open(shape, 0, [0] * num_ranks, CPU)
    buffer = torch.empty(shape.buffer_bytes, dtype=torch.uint8)
    lane = module.TritonLane(window, Lane(counters=0, first=shape.halves), buffer)
    rows = torch.zeros(num_rows, 2112, dtype=torch.bfloat16)
    lane.send(rows)
    gathered = lane.receive(rows)
    assert gathered.shape == (num_ranks * num_rows, 2112)
    assert gathered.data_ptr() == buffer.data_ptr() + shape.halves
    (_, sending), (_, waiting) = compiled
    ptx = sending.asm["ptx"]
    assert ptx.count("st.global.v4.b32") % num_ranks == 0
    assert "st.global.v4.b32" in ptx
    assert "ld.global.v4.b32" in ptx
    signals = [match.start() for match in re.finditer(r"atom\.global\.sys\.release\.add", ptx)]
    assert len(signals) == num_ranks
    assert ptx.rindex("st.global.v4") < ptx.rindex("bar.sync", 0, signals[0]) < signals[0]
    assert "ld.acquire.sys.global" in waiting.asm["ptx"]


def check_order(compiled: list[tuple[str, Any]], *, records: bool) -> None:
    """Look at what the order of stores, signals, waits and loads has become."""
    for name, kernel in compiled:
        ptx: str = kernel.asm["ptx"]
        assert "st.global.v4.b32" in ptx, name
        assert "ld.global.v4.b32" in ptx, name
        signals = [match.start() for match in re.finditer(r"atom\.global\.sys\.release\.add", ptx)]
        waits = [match.start() for match in re.finditer(r"ld\.acquire\.sys\.global", ptx)]
        num_waits = 0 if "send" in name else 2 if records else 1  # one program notes what it sees
        assert (len(signals), len(waits)) == (int("send" in name), num_waits), name
        if signals:
            # Nothing is stored behind the last barrier, and the signal stands there.
            barrier = ptx.rindex("bar.sync")
            assert ptx.rindex("st.global") < barrier < signals[0], name
        else:
            # What peers have written is read behind the barrier that follows the wait.
            barrier = ptx.index("bar.sync", waits[-1])
            assert "ld.global" not in ptx[waits[0] : barrier], name
            own = ptx[waits[0] : barrier].count("st.global")
            assert own == (2 if records else 0), "the record alone is written before"
            assert ("%globaltimer" in ptx[waits[0] : barrier]) == records
            assert "trap;" in ptx
        assert ("%globaltimer" in ptx) == (records and bool(waits)), name
