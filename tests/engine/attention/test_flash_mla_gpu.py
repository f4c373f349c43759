"""FlashMLA against the reference: strided layers of a pool, both dtypes, lengths that change."""

import pytest
import torch
from torch import Tensor

from engine.attention import flash_mla
from engine.attention.absorb_reference import collect, spread
from engine.attention.latent_storage import to_storage
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.attention.paged_reference import paged_attention
from engine.attention.schedule_reference import count_pages, even_schedule, tabulate
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

NUM_LAYERS, LAYER, PAGE, LATENT, RANK, SCALE = 3, 1, 64, 576, 512, 0.1352338
TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 6e-2}
"""Relative error: probabilities in bfloat16; with e4m3, queries and probabilities in e4m3."""


@pytest.fixture(scope="module", params=[False, True], ids=["schedule", "own-schedule"])
def kernel(request: pytest.FixtureRequest) -> flash_mla.FlashMLA:
    if not flash_mla.is_available():
        pytest.skip("needs a Hopper GPU with flash_mla")
    return flash_mla.FlashMLA(own_schedule=request.param)


def draw_case(
    lengths: list[int], dtype: torch.dtype, num_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, one strided layer of a pool, tables padded with block 0, and lengths."""
    torch.manual_seed(len(lengths))
    counts = [-(-length // PAGE) for length in lengths]
    pool = torch.randn(sum(counts) + 1, NUM_LAYERS, PAGE, LATENT, device="cuda")
    ids = (torch.randperm(sum(counts)) + 1).split(counts)
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, blocks in enumerate(ids):
        tables[row, : len(blocks)] = blocks
    q_SHL = torch.randn(len(lengths), num_heads, LATENT, device="cuda").bfloat16()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return q_SHL * 0.3, to_storage(pool, dtype)[:, LAYER], tables.cuda(), seq_lens


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize(
    "lengths", [[1], [64, 1, 65], [4096, 100, 1, 2000, 640], [1] * 33, [300] * 128]
)
def test_against_the_reference(
    kernel: flash_mla.FlashMLA, lengths: list[int], num_heads: int, dtype: torch.dtype
) -> None:
    q_SHL, cache, tables, seq_lens = draw_case(lengths, dtype, num_heads, width=80)
    assert kernel.takes(cache)
    queries = PagedQueries(block_tables_SB=tables, seq_lens_S=seq_lens)
    schedule = kernel.schedule(seq_lens, num_heads, cache.dtype)
    actual = kernel.paged_attention(q_SHL, cache, queries, schedule, SCALE)
    assert actual.shape == (len(lengths), num_heads, RANK)
    expected = paged_attention(q_SHL.float(), cache, queries, RANK, SCALE)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_heads", [16, 64, 128])
@pytest.mark.parametrize(
    "lengths", [[1], [4096, 100, 1, 2000, 640], [2048] * 64, [2000] * 32, [1] * 256]
)
def test_the_library_s_schedule_is_the_even_one(lengths: list[int], num_heads: int) -> None:
    """Row by row: ours are tables of the same form, so this is what says that form is known."""
    if not flash_mla.is_available():
        pytest.skip("needs a Hopper GPU with flash_mla")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    theirs = flash_mla.FlashMLA(own_schedule=False)
    tiles, sums = theirs.schedule(seq_lens, num_heads, torch.bfloat16)
    plain = even_schedule(count_pages(lengths), tiles.shape[0])
    rows, expected_sums = tabulate(plain, tiles.shape[0])
    assert tiles[:, :7].tolist() == [row[:7] for row in rows]
    assert sums.tolist() == expected_sums
    ours, _ = flash_mla.FlashMLA(own_schedule=True).schedule(seq_lens, num_heads, torch.bfloat16)
    assert ours.shape == tiles.shape


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_captured_step_follows_lengths_and_tables(
    kernel: flash_mla.FlashMLA, dtype: torch.dtype
) -> None:
    """The schedule is made inside the graph, and used by two layers' worth of attention."""
    lengths = [1] * 40
    q_SHL, cache, tables, seq_lens = draw_case([4096] * 40, dtype, 128, width=64)
    seq_lens.copy_(torch.tensor(lengths))
    queries = PagedQueries(block_tables_SB=tables, seq_lens_S=seq_lens)

    def step() -> tuple[Tensor, Tensor]:
        schedule = kernel.schedule(seq_lens, 128, cache.dtype)
        first = kernel.paged_attention(q_SHL, cache, queries, schedule, SCALE)
        return first, kernel.paged_attention(q_SHL * 0.5, cache, queries, schedule, SCALE)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        seq_lens.copy_(torch.randint(1, 4097, (40,)))
        tables.copy_(tables[torch.randperm(40, device="cuda")])
        graph.replay()
        for actual, scale in zip(captured, (1.0, 0.5), strict=True):
            expected = paged_attention(q_SHL.float() * scale, cache, queries, RANK, SCALE)
            assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("num_heads", "counts", "contexts"),
    [
        (16, [4, 4, 4], [4000, 100, 64]),
        (16, [64], [4096]),
        (16, [4, 1, 4, 2, 0, 0], [2000, 1, 4, 3, 1, 1]),
        (16, [3] * 40, [300] * 40),
        (64, [1, 1, 1], [1, 700, 65]),
        (128, [2, 2], [2, 640]),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_several_queries_a_sequence_against_the_reference(
    kernel: flash_mla.FlashMLA,
    num_heads: int,
    counts: list[int],
    contexts: list[int],
    is_known: bool,
) -> None:
    """The queries are a sequence's last positions; those that fill the rectangle are nobody's."""
    _, cache, tables, seq_lens = draw_case(contexts, torch.bfloat16, num_heads, width=80)
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    total = sum(counts)
    q_THL = 0.3 * torch.randn(total, num_heads, LATENT, device="cuda").bfloat16()
    lengths = list(zip(counts, contexts, strict=True)) if is_known else []
    queries = PagedQueries(
        block_tables_SB=tables,
        seq_lens_S=seq_lens,
        counts=QueryCounts(cu_seqlens_q=starts, most=max(counts), lengths=lengths, total=total),
    )
    if is_known and len(set(counts)) > 1:
        assert not kernel.takes_queries(queries, cache.dtype)
        return
    assert kernel.takes_queries(queries, cache.dtype)
    assert not kernel.takes_queries(queries, torch.float8_e4m3fn)
    planned = kernel.plan(queries, num_heads, cache.dtype)
    assert planned.schedule is not None
    out_RHC = kernel.paged_attention(
        spread(q_THL, planned), cache, planned, planned.schedule, SCALE
    )
    actual = collect(out_RHC, planned)
    expected = paged_attention(q_THL.float(), cache, queries, RANK, SCALE)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < TOLERANCE[torch.bfloat16]
