"""Slots and ways to experts as the configuration of a role says."""

import logging

import pytest
import torch

from bench.shapes import TINY
from engine.boot.experts import open_dispatcher, place_experts
from engine.config import ModelConfig
from engine.kernels.portable import PortableKernels
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.choose_dispatcher import RankExperts
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import SilentGroup

CPU = torch.device("cpu")
DIMS = ParallelDims(dp=6, ep=6)
GROUPS = ProcessGroups(dims=ParallelDims(dp=4, ep=4), ep_group=SilentGroup(size=4))
FP8 = PortableKernels(has_fp8=True)
CUDA = {"device": "cuda", "max_num_seqs": 64, "max_tokens_per_rank": 64}


def open_with(
    section: PrefillSection | DecodeSection,
    config: ModelConfig = TINY,
    groups: ProcessGroups = GROUPS,
) -> object:
    experts = RankExperts(
        config=config, groups=groups, kernels=FP8, device=torch.device(section.device)
    )
    return open_dispatcher(section, experts).dispatcher


def test_redundant_slots() -> None:
    section = DecodeSection(num_redundant_experts=8)
    placement = place_experts(section, TINY, DIMS, CPU)
    assert placement.num_physical_experts == 72
    counts = placement.logical_replica_count
    assert (int(counts.min()), int(counts.max()), int(counts.sum())) == (1, 2, 72)
    assert place_experts(DecodeSection(), TINY, ParallelDims(), CPU).is_identity
    with pytest.raises(ConfigError) as caught:
        place_experts(DecodeSection(num_redundant_experts=4), TINY, DIMS, CPU)
    assert caught.value.path == "ep"
    with pytest.raises(ConfigError):
        place_experts(PrefillSection(), TINY, ParallelDims(tp=6, ep=6), CPU)


def test_decode_on_gpus_dispatches_in_fixed_shapes() -> None:
    assert isinstance(open_with(DecodeSection(**CUDA)), MaskedGatheredDispatcher)
    assert isinstance(open_with(DecodeSection()), AllToAllDispatcher)
    named = DecodeSection(dispatcher="nvlink")
    assert isinstance(open_with(named), AllToAllDispatcher), "the field is for GPUs"


def test_data_parallel_prefill_on_gpus_asks_for_deep_ep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where it does not run, here, tokens travel by collectives."""
    assert isinstance(open_with(PrefillSection(device="cuda", dp=4)), AllToAllDispatcher)
    assert "tokens do not travel by DeepEP" in caplog.text
    caplog.clear()
    tp = ProcessGroups(dims=ParallelDims(tp=4, ep=4), ep_group=SilentGroup(size=4))
    assert isinstance(open_with(PrefillSection(device="cuda", tp=4), groups=tp), LocalDispatcher)
    assert isinstance(open_with(PrefillSection(dp=4)), AllToAllDispatcher)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_more_requests_than_room() -> None:
    crowded = DecodeSection(**(CUDA | {"max_num_seqs": 65}))
    with pytest.raises(ConfigError) as caught:
        open_with(crowded)
    assert (caught.value.path, caught.value.fix) == ("decode.max_num_seqs", "64 or less")
    alone = ProcessGroups()
    assert isinstance(open_with(crowded, groups=alone), MaskedGatheredDispatcher)
    assert isinstance(open_with(DecodeSection(max_num_seqs=200)), AllToAllDispatcher)
