"""Our paged attention against float64, on a GPU or in Triton's interpreter.

`TRITON_INTERPRET=1 pytest -m gpu tests/engine/attention/paged_mla` runs it on a CPU.
"""

import importlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.latent_storage import put_rows, to_storage
from engine.attention.paged_mla.tiles import HOPPER_TILE, VARIANTS
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.formats.triton_gemm.limits import AMPERE, HOPPER, DeviceLimits
from tests.engine.attention.paged_mla.cases import PagedCase, attend_exactly, draw_case
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # Of the interpreter, where a loop's bounds come from memory.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""The interpreter multiplies the bits of bfloat16."""
RANK, ROPE = (32, 16) if IS_INTERPRETED else (512, 64)
SCALE = 0.2 if IS_INTERPRETED else 0.06
TOLERANCE = 5e-3
"""Probabilities are rounded to 16 bits: 2**-9 of each in bfloat16."""
KINDS = ["plain", "e4m3", "bytes"]
"""How latents are stored, and, of e4m3, whether the GPU knows it."""
HEADS = [16, 64, 128]
KINDS_AND_HEADS = list(
    zip(KINDS, HEADS, strict=True) if IS_INTERPRETED else itertools.product(KINDS, HEADS)
)
FEW_HEADS = [("plain", 64), ("e4m3", 16), ("bytes", 16)] if IS_INTERPRETED else KINDS_AND_HEADS

DECODES = [[1], [64, 1, 65, 63], [0, 130, 0], [3] * 9]
EXTENDS = [
    [(2, 2)],
    [(4, 64), (4, 65), (4, 4)],
    [(17, 17), (1, 130), (2, 64), (17, 129)],
]
if not IS_INTERPRETED:
    DECODES += [[4096, 100, 1, 2000, 640], [300] * 300]
    EXTENDS += [[(170, 5000)], [(64, 3000), (1, 1), (100, 100), (33, 10_000)]]


def paged(kind: str, tile: Any = None, num_sms: int = 6) -> Any:
    """Return the kernel; a GPU of few multiprocessors cuts sequences, and is quick to interpret."""
    limits = HOPPER if IS_INTERPRETED else DeviceLimits.of(DEVICE)
    limits = replace(AMPERE if kind == "bytes" else limits, num_sms=num_sms)
    return importlib.import_module("engine.attention.paged_mla.attention").PagedMLA(limits, tile)


def draw(lengths: list[tuple[int, int]], kind: str, num_heads: int, block: int = 64) -> PagedCase:
    return draw_case(
        lengths,
        num_heads=num_heads,
        rank=RANK,
        rope=ROPE,
        dtype=DTYPE,
        pool_dtype=DTYPE if kind == "plain" else torch.float8_e4m3fn,
        block_size=block,
        device=DEVICE,
    )


def attend(kernel: Any, case: PagedCase, *, on_host: bool = False) -> Tensor:
    """Attend, planned on the device as a decode step is, or on the host as prefill is."""
    heads = case.q_THL.shape[1]
    counts = None
    if on_host or case.max_queries > 1:
        lengths = case.lengths if on_host else ()
        counts = QueryCounts(cu_seqlens_q=case.cu_seqlens_q, most=case.max_queries, lengths=lengths)
    queries = PagedQueries(
        block_tables_SB=case.block_tables, seq_lens_S=case.seq_lens, counts=counts
    )
    queries = kernel.plan(queries, case.cache, heads)
    out: Tensor = kernel.paged_attention(case.q_THL, case.cache, queries, RANK, SCALE)
    return out


def check(case: PagedCase, actual: Tensor) -> None:
    expected = attend_exactly(case, RANK, SCALE)
    assert actual.shape == expected.shape
    assert actual.dtype == DTYPE
    assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize(("kind", "num_heads"), KINDS_AND_HEADS)
@pytest.mark.parametrize("lengths", DECODES)
def test_one_query_a_sequence(lengths: list[int], num_heads: int, kind: str) -> None:
    case = draw([(1, length) for length in lengths], kind, num_heads)
    actual = attend(paged(kind), case)
    check(case, actual)
    empty = [row for row, length in enumerate(lengths) if length == 0]
    assert not actual[empty].any(), "nothing is seen"


@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("lengths", [*DECODES, [70, 0, 1, 0] * 4, [129] * 5])
@pytest.mark.parametrize("kind", ["plain", "e4m3"])
def test_all_kernels_for_hopper(kind: str, lengths: list[int], num_heads: int) -> None:
    if IS_INTERPRETED or DeviceLimits.of(DEVICE).sm != 90:
        pytest.skip("for Hopper")
    case = draw([(1, length) for length in lengths], kind, num_heads)
    for tile in [HOPPER_TILE, *VARIANTS[kind == "e4m3"]]:
        for num_sms in (2, 13, 132):
            check(case, attend(paged(kind, tile, num_sms), case))


@pytest.mark.parametrize("lengths", EXTENDS)
@pytest.mark.parametrize("kind", ["plain", "e4m3"])
def test_all_kernels_for_hopper_see_positions_up_to_their_own(
    kind: str, lengths: list[tuple[int, int]]
) -> None:
    if IS_INTERPRETED or DeviceLimits.of(DEVICE).sm != 90:
        pytest.skip("for Hopper")
    case = draw(lengths, kind, 16, block=128)
    for tile in VARIANTS[kind == "e4m3"]:
        check(case, attend(paged(kind, tile), case, on_host=True))


@pytest.mark.parametrize(("kind", "num_heads"), FEW_HEADS)
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("lengths", EXTENDS)
def test_several_queries_see_the_positions_up_to_their_own(
    lengths: list[tuple[int, int]], num_heads: int, kind: str, on_host: bool
) -> None:
    case = draw(lengths, kind, num_heads)
    check(case, attend(paged(kind), case, on_host=on_host))


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("kind", ["plain", "e4m3"])
def test_blocks_of_any_size(block_size: int, kind: str) -> None:
    lengths = [(1, 130), (1, 7), (1, 16), (1, 65)]
    case = draw(lengths, kind, 16, block=block_size)
    check(case, attend(paged(kind), case))
    several = draw([(3, 130), (2, 16)], kind, 16, block=block_size)
    check(several, attend(paged(kind), several, on_host=True))


def test_a_sequence_is_cut_and_merged_whatever_the_others_are() -> None:
    """With more programs than sequences, and one that is far longer than the rest."""
    case = draw([(1, 330), (1, 1), (1, 64)], "plain", 16)
    for num_sms in (1, 2, 5):
        check(case, attend(paged("plain", num_sms=num_sms), case))


def test_more_sequences_than_are_dealt_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("engine.attention.paged_mla.attention")
    monkeypatch.setattr(module, "MAX_SEQS", 4)
    case = draw([(1, 1 + 60 * (row % 3)) for row in range(9)], "plain", 16)
    check(case, attend(paged("plain", num_sms=2), case))


def test_what_a_token_saw_is_nan_if_its_latents_are() -> None:
    """Of its own sequence, and nobody else's."""
    for kind in ("plain", "bytes") if IS_INTERPRETED else KINDS:  # it has no NaN in e4m3
        case = draw([(1, 70), (1, 90)], kind, 16)
        rows = torch.full((1, RANK + ROPE), float("nan"), device=DEVICE)
        put_rows(case.cache, case.block_tables[1, 1:2].long() * 64 + 5, rows)
        actual = attend(paged(kind), case)
        assert actual[1].isnan().any()
        assert actual[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_heads", [16, 64])
def test_every_candidate_computes_the_same(kind: str, num_heads: int) -> None:
    tiles = importlib.import_module("engine.attention.paged_mla.tiles")
    limits = AMPERE if kind == "bytes" else HOPPER
    if not IS_INTERPRETED and kind != "bytes":
        limits = DeviceLimits.of(DEVICE)
    case = draw([(1, 70), (1, 3)], kind, num_heads)
    for tile in tiles.candidates(limits, num_heads, tiles.PoolShape.of(case.cache)):
        check(case, attend(paged(kind, tile, num_sms=2), case))


@pytest.mark.skipif(IS_INTERPRETED, reason="there are no graphs")
@pytest.mark.parametrize("kind", ["plain", "e4m3"])
def test_a_captured_step_follows_lengths_and_tables(kind: str) -> None:
    """Parts are made inside the graph, and used by two layers' worth of attention."""
    case = draw([(1, 4096)] * 40, kind, 128)
    kernel, lens, tables = paged(kind, num_sms=132), case.seq_lens, case.block_tables
    case.cache.copy_(to_storage(torch.randn(case.cache.shape, device=DEVICE), case.cache.dtype))
    lens.fill_(1)

    def step() -> tuple[Tensor, Tensor]:
        queries = kernel.plan(
            PagedQueries(block_tables_SB=tables, seq_lens_S=lens), case.cache, 128
        )
        first = kernel.paged_attention(case.q_THL, case.cache, queries, RANK, SCALE)
        return first, kernel.paged_attention(case.q_THL * 0.5, case.cache, queries, RANK, SCALE)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        lens.copy_(torch.randint(0, 4097, (40,)))
        tables.copy_(tables[torch.randperm(40, device=DEVICE)])
        graph.replay()
        lengths = tuple((1, int(length)) for length in lens)
        for actual, factor in zip(captured, (1.0, 0.5), strict=True):
            now = replace(case, q_THL=case.q_THL * factor, lengths=lengths)
            check(now, actual)


def test_no_tokens() -> None:
    case = draw([(1, 1)], "plain", 16)
    kernel = paged("plain")
    queries = PagedQueries(block_tables_SB=case.block_tables[:0], seq_lens_S=case.seq_lens[:0])
    queries = kernel.plan(queries, case.cache, 16)
    assert kernel.paged_attention(case.q_THL[:0], case.cache, queries, RANK, SCALE).shape[0] == 0


def test_what_is_not_taken_is_said() -> None:
    kernel = paged("plain")
    cache = torch.zeros(2, 64, RANK + ROPE, dtype=DTYPE, device=DEVICE)
    assert kernel.why_not(cache, RANK) == ""
    assert "kv_lora_rank 24 is no power of two" in kernel.why_not(cache[..., :40], 24)
    assert "qk_rope_head_dim 8" in kernel.why_not(cache[..., : RANK + 8], RANK)
    assert "in torch.float32" in kernel.why_not(cache.float(), RANK)
