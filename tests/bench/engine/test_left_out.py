"""What a proxy leaves out is said with its numbers."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.left_out import expected_ranks, left_out
from bench.engine.options import Axis, Setup
from bench.engine.routing import uniform_experts
from bench.engine.shapes import choose_model
from bench.shapes import DEEPSEEK_V3, TINY


def told(setup: Setup, role: str) -> str:
    return "; ".join(left_out(choose_model(setup), setup, role))


def test_decode_on_four_of_eight() -> None:
    setup = Setup(dp=4, shard_of=8, shard_axis=Axis.DP)
    text = told(setup, "decode")
    for said in (
        "128 of the 128 heads", "32 of the 256 experts", "as many rows an expert in the mean",
        "0.750 comes from others, with 8 ranks it would be 0.875",
        "slowest of 4 ranks instead of 8", "begins when 4 have met",
        "to 2.72 other ranks in the mean (uniform routing), with 8 ranks to 3.18",
        "for the tokens of 4 ranks instead of 8",
        "scores 128 experts instead of 256 and leaves the choice of groups out",
        "0.97 of the variance",
        "not in it: places, arriving KV",
    ):  # fmt: skip
        assert said in text, said


def test_prefill_of_shared_heads() -> None:
    text = told(Setup(tp=4, shard_of=8), "prefill")
    for said in (
        "16 of the 128 heads", "a token chooses 4 of 128 experts instead of 8 of 256",
        "for 1/4 of the tokens instead of 1/8", "over 4 ranks instead of 8",
        "not in it: queues, the scheduler",
    ):  # fmt: skip
        assert said in text, said
    assert "travels to" not in text


def test_a_rank_alone() -> None:
    text = told(Setup(shard_of=8, shard_axis=Axis.DP), "decode")
    assert "waits for nobody, and nothing travels" in text
    assert "no rank is ever fuller than another" in text
    assert "0.77 of the variance" in text


def test_the_whole_model_leaves_out_what_no_cluster_does() -> None:
    setup = Setup(tp=8)
    assert left_out(choose_model(setup), setup, "prefill")[0].startswith("not in it: queues")
    assert "proxy" not in told(setup, "prefill")
    cpu = Setup(shape="tiny", device="cpu")
    assert "its times say nothing" in told(cpu, "decode")
    assert "its times say nothing" not in told(Setup(dp=2), "decode")


@given(
    groups=st.sampled_from((1, 2, 4, 8)),
    size=st.integers(2, 8),
    data=st.data(),
    seed=st.integers(0, 2**32),
)
def test_ranks_of_a_token_are_as_many_as_draws_give(
    groups: int, size: int, data: st.DataObject, seed: int
) -> None:
    kept = data.draw(st.integers(1, groups))
    num_ranks = data.draw(st.sampled_from([n for n in (1, 2, 4, 8) if groups % n == 0]))
    config = replace(
        TINY,
        n_routed_experts=groups * size,
        n_group=groups,
        topk_group=kept,
        num_experts_per_tok=data.draw(st.integers(1, kept * size)),
    )
    expected = expected_ranks(config, num_ranks)
    assert 1.0 - 1e-9 <= expected <= num_ranks + 1e-9
    ids = uniform_experts(config, 3000, torch.Generator().manual_seed(seed))
    ranks = ids // (config.n_routed_experts // num_ranks)
    found = torch.stack([(ranks == rank).any(dim=1) for rank in range(num_ranks)]).sum(dim=0)
    assert float(found.double().mean()) == pytest.approx(expected, abs=7 * 4 / 3000**0.5)


def test_deepseek_v3_over_eight_ranks() -> None:
    assert expected_ranks(DEEPSEEK_V3, 8) == pytest.approx(3.63, abs=0.01)
    assert expected_ranks(DEEPSEEK_V3, 1) == pytest.approx(1.0)
