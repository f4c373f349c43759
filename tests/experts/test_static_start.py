"""A recording places experts at the start, layer by layer, and is refused where it is of others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.shapes import TINY
from engine.boot.experts import check_agreement, place_experts
from engine.options import EngineOptions, TokenSteps
from engine.parallel.dims import ParallelDims
from experts.balancedness import balancedness_of, rank_rows
from experts.static_start import RecordedLoad, read_recorded_load
from experts.trace import ExpertTrace
from runtime.errors import ConfigError

CPU = torch.device("cpu")
DIMS = ParallelDims(dp=8, ep=8)
OPTIONS = EngineOptions(steps=TokenSteps(), prefix="decode.")
EXPERTS, LAYERS = TINY.n_routed_experts, TINY.num_moe_layers


def recorded(**changes: Any) -> RecordedLoad:
    """By Zipf's law, other experts in each layer."""
    generator = np.random.default_rng(1)
    likely = 1.0 / np.arange(1, EXPERTS + 1) ** 0.4
    rows = [generator.permutation((1e5 * likely).astype(np.int64)) for _ in range(LAYERS)]
    counts = np.array([rows])
    values: dict[str, Any] = {
        "counts_NLE": counts,
        "tokens_N": counts.sum(axis=2).max(axis=1),
        "role": "decode",
        "model_name": "tiny",
        "top_k": TINY.num_experts_per_tok,
        "num_ranks": 2,
        "hidden_size": TINY.hidden_size,
        "moe_intermediate_size": TINY.moe_intermediate_size,
        "expert_bytes": 1,
    }
    trace = ExpertTrace(**(values | changes))
    return RecordedLoad(trace=trace, field="decode.expert_load", path=Path("decode.npz"))


@pytest.mark.parametrize("num_redundant", [0, 8])
def test_every_layer_is_balanced_by_itself(num_redundant: int) -> None:
    load = recorded()
    options = dataclasses.replace(OPTIONS, num_redundant_experts=num_redundant)
    before = place_experts(options, TINY, DIMS, CPU).table
    after = place_experts(options, TINY, DIMS, CPU, load=load).table
    assert len(set(after)) == LAYERS
    even, placed = (
        balancedness_of(rank_rows(load.trace.counts_NLE, np.array(table), 8))
        for table in (before, after)
    )
    assert even.worst_layer < 0.9
    assert placed.worst_layer > (0.97 if num_redundant else even.worst_layer + 0.05)
    for row in after:
        assert set(row) == set(range(EXPERTS))


def test_layers_that_draft_and_were_not_recorded_are_dealt_out_evenly() -> None:
    drafting = dataclasses.replace(TINY, num_nextn_predict_layers=1)
    table = place_experts(OPTIONS, drafting, DIMS, CPU, with_mtp=True, load=recorded()).table
    assert len(table) == LAYERS + 1
    assert sorted(table[-1]) == list(range(EXPERTS))


def test_layers_that_drafted_and_do_not_any_more_are_left_out() -> None:
    plain = recorded()
    more = np.concatenate([plain.trace.counts_NLE] * 2, axis=1)[:, : LAYERS + 1]
    load = recorded(counts_NLE=more, num_draft_layers=1)
    table = place_experts(OPTIONS, TINY, DIMS, CPU, load=load).table
    assert table == place_experts(OPTIONS, TINY, DIMS, CPU, load=plain).table


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"top_k": 1}, "1 experts a token"),
        ({"hidden_size": 17}, "17 numbers of a hidden state"),
        ({"moe_intermediate_size": 9}, "9 columns of an expert"),
        ({"num_draft_layers": 1}, f"{LAYERS - 1} layers with experts"),
        ({"counts_NLE": np.ones((1, LAYERS, 32), dtype=np.int64)}, "32 experts, and this"),
        ({"counts_NLE": np.zeros((1, LAYERS, EXPERTS), dtype=np.int64)}, "holds no token"),
    ],
)
def test_a_recording_of_another_model_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        place_experts(OPTIONS, TINY, DIMS, CPU, load=recorded(**changes))
    assert (caught.value.path, caught.value.value) == ("decode.expert_load", "decode.npz")


def test_a_recording_of_another_role_or_name_is_refused() -> None:
    load = recorded()
    load.check(role="decode", model_name="tiny")
    with pytest.raises(ConfigError, match="was recorded of decode, whose text"):
        load.check(role="prefill", model_name="tiny")
    with pytest.raises(ConfigError, match="recorded of 'tiny', and this is 'large'"):
        load.check(role="decode", model_name="large")


def test_a_file_is_read_or_refused_by_the_field(tmp_path: Path) -> None:
    assert read_recorded_load("", "decode.expert_load") is None
    path = tmp_path / "decode.npz"
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        read_recorded_load(str(path), "decode.expert_load")
    assert caught.value.path == "decode.expert_load"
    recorded().trace.save(path)
    load = read_recorded_load(str(path), "decode.expert_load")
    assert load is not None
    assert np.array_equal(load.trace.counts_NLE, recorded().trace.counts_NLE)


class TwoRanks:
    """The other rank has read a file of its own, or the same."""

    def __init__(self, other: int | None) -> None:
        self._other = other

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        other = tensor if self._other is None else torch.tensor([self._other])
        return torch.cat((tensor, other))


def test_ranks_that_read_other_files_do_not_start() -> None:
    load = recorded()
    placements = place_experts(OPTIONS, TINY, DIMS, CPU, load=load)
    check_agreement(load, placements, TwoRanks(None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="otherwise than the file of rank 1"):
        check_agreement(load, placements, TwoRanks(5))  # type: ignore[arg-type]
