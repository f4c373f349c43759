"""Axes that fit, and refusals that name the axis and a length that fits."""

import pytest

from engine.config import DeepseekV3Config
from engine.model.spec import check_dims
from engine.parallel.dims import ParallelDims
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config

CONFIG = DeepseekV3Config.from_hf(tiny_config())


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "rank", "field"),
    [
        (0, 1, 1, 0, "tp"),
        (1, 0, 1, 0, "dp"),
        (1, 1, 0, 0, "ep"),
        (2, 2, 4, 0, "dp"),
        (4, 1, 2, 0, "ep"),
        (1, 4, 2, 0, "ep"),
        (2, 1, 1, 2, "rank"),
        (1, 1, 1, -1, "rank"),
    ],
)
def test_lengths_that_do_not_fit(tp: int, dp: int, ep: int, rank: int, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ParallelDims(tp=tp, dp=dp, ep=ep, rank=rank)
    assert caught.value.path == field
    assert caught.value.fix


def test_place_on_each_axis() -> None:
    prefill = ParallelDims(tp=4, ep=4, rank=3)
    assert (prefill.world_size, prefill.tp_rank, prefill.ep_rank) == (4, 3, 3)
    decode = ParallelDims(dp=4, ep=4, rank=2)
    assert (decode.world_size, decode.tp_rank, decode.ep_rank) == (4, 0, 2)
    assert ParallelDims(tp=2, rank=1).ep_rank == 0


@pytest.mark.parametrize(
    ("changes", "dims", "axis", "fix"),
    [
        ({}, ParallelDims(tp=3), "tp", "use 2 or 4"),
        ({"num_attention_heads": 6}, ParallelDims(tp=4), "tp", "use 3 or 6"),
        ({"intermediate_size": 90}, ParallelDims(tp=4), "tp", "use 3 or 5"),
        ({"moe_intermediate_size": 30}, ParallelDims(tp=4), "tp", "use 3 or 5"),
        ({"moe_intermediate_size": 30}, ParallelDims(tp=4, ep=4), "tp", "use 3 or 5"),
        ({}, ParallelDims(dp=3, ep=3), "ep", "use 2 or 4"),
    ],
)
def test_models_that_cannot_be_split(
    changes: dict[str, int], dims: ParallelDims, axis: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_dims(dims, DeepseekV3Config.from_hf(tiny_config(**changes)))
    assert (caught.value.path, caught.value.fix) == (axis, fix)


@pytest.mark.parametrize(
    "dims", [ParallelDims(), ParallelDims(tp=4), ParallelDims(tp=4, ep=4), ParallelDims(dp=8, ep=8)]
)
def test_models_that_can(dims: ParallelDims) -> None:
    check_dims(dims, CONFIG)


def test_redundant_experts_count() -> None:
    dims = ParallelDims(dp=3, ep=3)
    check_dims(dims, CONFIG, num_physical_experts=9)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"2 cuda device") as caught:
        ParallelDims(dp=4, ep=4).check_devices(2, "cuda")
    assert caught.value.path == "dp"
    with pytest.raises(ConfigError, match="'cpu'"):
        ParallelDims(tp=2).check_devices(0, "cuda")
    ParallelDims(tp=2).check_devices(2, "cuda")
