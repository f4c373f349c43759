"""Slots and ways to experts as the options of an engine say."""

import logging
from dataclasses import replace

import pytest
import torch

from bench.shapes import TINY
from engine.boot.experts import open_dispatcher, place_experts
from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from engine.options import ChunkSteps, DispatcherKind, EngineOptions, TokenSteps
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.choose_dispatcher import RankExperts
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import SilentGroup

CPU = torch.device("cpu")
DIMS = ParallelDims(dp=6, ep=6)
DIMS8 = ParallelDims(dp=8, ep=8)
GROUPS = ProcessGroups(dims=ParallelDims(dp=4, ep=4), ep_group=SilentGroup(size=4))
FP8 = portable_kernels(has_fp8=True)
CHUNKS = EngineOptions(steps=ChunkSteps())
TOKENS = EngineOptions(steps=TokenSteps())
FEW_TOKENS = EngineOptions(
    steps=TokenSteps(max_tokens_per_rank=64), device="cuda", max_num_seqs=64, prefix="decode."
)


def open_with(
    options: EngineOptions,
    config: DeepseekV3Config = TINY,
    groups: ProcessGroups = GROUPS,
) -> object:
    experts = RankExperts(
        config=config, groups=groups, kernels=FP8, device=torch.device(options.device)
    )
    return open_dispatcher(options, experts).dispatcher


def test_redundant_slots() -> None:
    placement = place_experts(replace(TOKENS, num_redundant_experts=8), TINY, DIMS, CPU)
    assert placement.num_physical_experts == 72
    counts = placement.of_layer(TINY.num_hidden_layers - 1).logical_replica_count
    assert (int(counts.min()), int(counts.max()), int(counts.sum())) == (1, 2, 72)
    alone = place_experts(TOKENS, TINY, ParallelDims(), CPU)
    assert alone.num_layers == TINY.num_moe_layers
    assert all(row == tuple(range(64)) for row in alone.table)
    with pytest.raises(ConfigError) as caught:
        place_experts(replace(TOKENS, num_redundant_experts=4), TINY, DIMS, CPU)
    assert caught.value.path == "ep"
    with pytest.raises(ConfigError):
        place_experts(CHUNKS, TINY, ParallelDims(tp=6, ep=6), CPU)


def test_a_placement_that_is_known() -> None:
    rows = [tuple(range(64)), tuple(reversed(range(64)))] * TINY.num_moe_layers
    table = rows[: TINY.num_moe_layers]
    assert place_experts(TOKENS, TINY, DIMS8, CPU, table=table).table == tuple(table)
    for wrong, problem in (
        (table[1:], "the model has"),
        ([*table[1:], (0, *range(64))], "has 65 slots instead of 64"),
        ([*table[1:], (0, *range(63))], r"experts \[63\] have no slot"),
    ):
        with pytest.raises(ConfigError, match=problem) as caught:
            place_experts(replace(TOKENS, prefix="decode."), TINY, DIMS8, CPU, table=wrong)
        assert caught.value.path == "decode.expert_placement"
        assert caught.value.fix


def test_decode_on_gpus_dispatches_in_fixed_shapes() -> None:
    assert isinstance(open_with(FEW_TOKENS), MaskedGatheredDispatcher)
    assert isinstance(open_with(TOKENS), AllToAllDispatcher)
    named = EngineOptions(steps=TokenSteps(dispatcher=DispatcherKind.NVLINK))
    assert isinstance(open_with(named), AllToAllDispatcher), "the field is for GPUs"


def test_data_parallel_prefill_on_gpus_asks_for_deep_ep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where it does not run, here, tokens travel by collectives."""
    on_gpu = replace(CHUNKS, device="cuda")
    assert isinstance(open_with(on_gpu), AllToAllDispatcher)
    assert "tokens do not travel by DeepEP" in caplog.text
    caplog.clear()
    tp = ProcessGroups(dims=ParallelDims(tp=4, ep=4), ep_group=SilentGroup(size=4))
    assert isinstance(open_with(on_gpu, groups=tp), LocalDispatcher)
    assert isinstance(open_with(CHUNKS), AllToAllDispatcher)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_more_requests_than_room() -> None:
    crowded = replace(FEW_TOKENS, max_num_seqs=65)
    with pytest.raises(ConfigError) as caught:
        open_with(crowded)
    assert (caught.value.path, caught.value.fix) == ("decode.max_num_seqs", "64 or less")
    assert caught.value.problem == "decode.max_tokens_per_rank is 64"
    drafting = replace(FEW_TOKENS, steps=replace(FEW_TOKENS.steps, num_speculative_tokens=2))
    with pytest.raises(ConfigError, match="brings 3 tokens to a step") as caught:
        open_with(replace(drafting, max_num_seqs=22))
    assert (caught.value.path, caught.value.fix) == ("decode.max_num_seqs", "21 or less")
    alone = ProcessGroups()
    assert isinstance(open_with(crowded, groups=alone), MaskedGatheredDispatcher)
    assert isinstance(open_with(replace(TOKENS, max_num_seqs=200)), AllToAllDispatcher)
