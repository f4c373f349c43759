"""Bounds are those of arithmetic; calls pass through unchanged."""

from dataclasses import replace

import pytest
import torch

from bench.stage_timer import (
    TRAFFIC_MARK,
    StageTimer,
    TimerMode,
    attention_operations,
    full_attention_operations,
    paged_operations,
)
from engine.attention.kernels import VarlenLengths
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.formats.stored_weight import StoredWeight
from engine.kernels.portable import portable_kernels
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.norm import RMS_NORM
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.weights.fp8 import quantize_block
from experts.data_sheets import H200
from tests.engine.formats.fp8 import fp8_of, quantize


def test_calls_pass_through_and_are_counted_by_shape() -> None:
    kernels = portable_kernels(has_fp8=True)
    timer = StageTimer(kernels, H200)
    assert timer.kernels.name == kernels.name
    fp8, watched = fp8_of(kernels), fp8_of(timer.kernels)
    assert watched.name == fp8.name
    x, weight = torch.randn(64, 512), StoredWeight(*quantize_block(torch.randn(256, 512)))
    expected = fp8.linear(quantize(kernels, x), weight)
    assert torch.equal(watched.linear(quantize(timer.kernels, x), weight), expected)
    assert timer.stages == {}, "off at first"
    timer.mode = TimerMode.BOUNDS
    watched.linear(quantize(timer.kernels, x), weight)
    assert set(timer.stages) == {"quantize_rows 512", "linear 256x512"}
    scales = 4 * 64 * 4
    moved = {"quantize_rows 512": 64 * 512 * 4 + 64 * 512 + scales}
    moved["linear 256x512"] = 64 * 512 + scales + 256 * 512 + 2 * 4 * 4 + 64 * 256 * 2
    for name, stage in timer.stages.items():
        operations = 2 * 64 * 512 * 256 if "linear" in name else 0
        assert stage.bound_s == pytest.approx(max(operations / H200.fp8, moved[name] / H200.memory))
    timer.reset()
    assert timer.stages == {}


def test_causal_attention_counts_visible_pairs() -> None:
    q, k, v = torch.randn(5, 2, 24), torch.randn(9, 2, 24), torch.randn(9, 2, 16)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    seqs = VarlenLengths(lengths=[(2, 6), (3, 3)], cu_seqlens_q=ends, cu_seqlens_k=ends)
    pairs = (5 + 6) + (1 + 2 + 3)
    assert attention_operations(q, v, seqs) == 2 * pairs * 2 * (24 + 16)
    timer = StageTimer(portable_kernels(), H200)
    timer.mode = TimerMode.BOUNDS
    timer.kernels.attention.varlen_attention(q, k, v, seqs, 1.0)
    assert timer.stages["varlen_attention"].bound_s > 2 * pairs * 2 * 40 / H200.attention * 0.99


def test_attention_to_pages_counts_visible_pairs() -> None:
    kernels = portable_kernels(has_paged_attention=True)
    q, cache = torch.randn(5, 2, 24), torch.randn(4, 8, 24)
    tables, lens = torch.tensor([[1, 2], [3, 0]]).int(), torch.tensor([9, 3]).int()
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    single = PagedQueries(block_tables_SB=tables, seq_lens_S=lens)
    queries = replace(single, counts=QueryCounts(cu_seqlens_q=starts, most=3))
    assert paged_operations(q, queries, 16) == 2 * (8 + 9 + 1 + 2 + 3) * 2 * (24 + 16)
    assert paged_operations(q[:2], single, 16) == 2 * (9 + 3) * 2 * (24 + 16)
    timer = StageTimer(kernels, H200)
    timer.mode = TimerMode.BOUNDS
    assert timer.kernels.attention.why_no_pages(cache, 16) == ""
    timer.kernels.attention.paged_attention(
        q[:2], cache, timer.kernels.attention.plan_paged(single, cache, 2), 16, 1.0
    )
    assert timer.stages["plan_paged"].bound_s == 0.0
    assert set(timer.stages) == {"plan_paged", "paged_attention"}


def test_parts_of_a_context_count_what_they_see() -> None:
    q, k, v = torch.randn(2, 2, 24), torch.randn(6, 2, 24), torch.randn(6, 2, 16)
    ends = torch.tensor([0, 2], dtype=torch.int32)
    seqs = VarlenLengths(lengths=[(2, 6)], cu_seqlens_q=ends, cu_seqlens_k=3 * ends)
    assert full_attention_operations(q, v, seqs) == 2 * 12 * 2 * (24 + 16)
    bounds = []
    for is_causal in (True, False):
        timer = StageTimer(portable_kernels(), H200)
        timer.mode = TimerMode.BOUNDS
        timer.kernels.attention.varlen_attention_part(q, k, v, seqs, 1.0, is_causal=is_causal)
        bounds.append(timer.stages["varlen_attention_part"].bound_s)
    assert bounds[1] >= bounds[0] > 0


def test_masked_experts_count_rows_in_use() -> None:
    kernels = portable_kernels(has_fp8=True)
    timer = StageTimer(kernels, H200)
    ids = torch.tensor([[0, 1], [0, 1], [1, 0]])
    places = kernels.ops[MOE_ALIGN_MASKED](ids, 0, 2, 128)
    rows = kernels.ops[PERMUTE_MASKED_ROWS](quantize(kernels, torch.randn(3, 128)), places)
    weights = [quantize_block(torch.randn(2 * 256, 128)), quantize_block(torch.randn(256, 128))]
    w13, w2 = (StoredWeight(w.view(2, -1, 128), s.view(2, -1, 1)) for w, s in weights)
    timer.mode = TimerMode.BOUNDS
    fp8_of(timer.kernels).masked_mlp(rows, w13, w2)
    moved = sum(weight.numel() + 4 * scale.numel() for weight, scale in weights) + 6 * 128 * 3
    assert timer.stages["masked_mlp"].bound_s == pytest.approx(moved / H200.memory)


class EchoGroup(RankGroup):
    """Two ranks of which the other is silent."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def test_calls_and_collectives_are_named_in_a_trace() -> None:
    timer = StageTimer(portable_kernels(), H200)
    groups = ProcessGroups(
        dims=ParallelDims(tp=2), tp_group=EchoGroup(size=2), ep_group=RankGroup()
    )
    watched = timer.watch_groups(groups)
    assert watched.tp_group.size == 2
    assert watched.ep_group is groups.ep_group, "a group of one exchanges nothing"
    x = torch.ones(4, 32)
    for mode, names in (
        (TimerMode.OFF, set()),
        (TimerMode.RANGES, {"rms_norm 32", TRAFFIC_MARK + "all_reduce"}),
    ):
        timer.mode = mode
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            assert torch.equal(watched.tp_group.all_reduce(x), x)
            timer.kernels.ops[RMS_NORM](x, torch.ones(32), 1e-6)
        found = {event.key for event in profiler.key_averages()}
        assert {name for name in found if not name.startswith("aten::")} == names
