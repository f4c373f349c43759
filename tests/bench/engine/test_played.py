"""Four ranks that play four of eight: the busiest gets as many rows as it would among eight."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.engine.left_out import left_out
from bench.engine.options import Axis, PrefillOptions, Routing, Setup
from bench.engine.played import (
    chances_of,
    choose_ranks,
    draw_played,
    play_ranks,
    sampled_experts,
)
from bench.engine.played_tables import (
    describe_played,
    describe_times,
    other_ranks,
    place_experts,
    rows_of_ranks,
    sample_whole,
    trace_of,
)
from bench.engine.plays import Plays
from bench.engine.shapes import choose_model
from bench.experts.skew import log_likelihoods
from bench.shapes import TINY
from experts.balance import balance_experts
from experts.balancedness import even_placement
from runtime.errors import ConfigError

pytestmark = pytest.mark.nightly

NUM_RANKS, NUM_HERE, TOP_K = 8, 4, TINY.num_experts_per_tok
NUM_EXPERTS = TINY.n_routed_experts
NUM_LAYERS = 2


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table_here(num_redundant: int) -> np.ndarray:
    """As `engine.boot.experts.place_experts` deals redundant slots out where nothing is known."""
    num_experts = NUM_EXPERTS * NUM_HERE // NUM_RANKS
    slots: Sequence[int] = range(num_experts)
    if num_redundant:
        slots = balance_experts(
            [1.0] * num_experts, num_slots=num_experts + num_redundant, num_ranks=NUM_HERE
        )
    return np.tile(slots, (NUM_LAYERS, 1))


@pytest.mark.parametrize("plays", [Plays.IN_ORDER, Plays.RECORDED, Plays.PLANNED])
@pytest.mark.parametrize("num_redundant", [0, 8, 16])
def test_the_busiest_rank_gets_the_rows_of_the_busiest_of_eight(
    plays: Plays, num_redundant: int
) -> None:
    """Counted by the dealing of a worker, there of other tokens than those that chances are of."""
    log_LE = torch.from_numpy(log_likelihoods(NUM_LAYERS, NUM_EXPERTS, seed=3))
    generator = seeded(1)
    recorded, known, fresh = (sample_whole(TINY, log_LE, 65_536, generator) for _ in range(3))
    table_Lp = table_here(num_redundant)
    placed_LP = place_experts(
        plays,
        trace_of(TINY, recorded.counts_LE, num_ranks=NUM_RANKS, num_tokens=8192),
        num_slots=2 * table_Lp.shape[1],
        num_ranks=NUM_RANKS,
    )
    ranks = play_ranks(
        known.counts_LE, placed_LP, table_Lp, num_ranks=NUM_RANKS, num_here=NUM_HERE, top_k=TOP_K
    )
    chances = [
        chances_of(chance_p, table_p.tolist(), TOP_K)
        for chance_p, table_p in zip(ranks.chance_Lp, table_Lp, strict=True)
    ]
    drawn = draw_played(chances, num_steps=1, num_tokens=65_536, top_k=TOP_K, generator=seeded(2))
    for layer in range(NUM_LAYERS):
        there_R = rows_of_ranks(fresh.ids_LTK[layer], placed_LP[layer], NUM_RANKS).double()
        here_r = rows_of_ranks(drawn[0, layer], table_Lp[layer], NUM_HERE).double()
        there_R, here_r = there_R / there_R.mean(), here_r / here_r.mean()
        busiest = ranks.ranks_Lr[layer, 0]
        assert float(here_r[0]) == pytest.approx(ranks.rows_LR[layer].max(), rel=0.01)
        # Of 16,384 tokens alone, so less exactly.
        assert float(here_r[0]) == pytest.approx(float(there_R[busiest]), rel=0.025)
        assert np.allclose(here_r.numpy(), ranks.played_Lr[layer], rtol=0.02)
        assert float(here_r.max()) <= max(float(here_r[0]) * 1.01, 1.02)
    assert len(set(ranks.ranks_Lr[0])) == NUM_HERE
    told = describe_played(ranks, num_redundant=2 * num_redundant)
    assert told["whole_balancedness"] == pytest.approx(ranks.balancedness)
    assert (ranks.balancedness < 0.75) is (plays is Plays.IN_ORDER)


def test_slots_get_their_shares_of_a_rank() -> None:
    """Without redundancy and in order, what an expert gets is what it gets among eight."""
    log_LE = torch.from_numpy(log_likelihoods(1, NUM_EXPERTS, seed=5, sigma=0.5))
    known = sample_whole(TINY, log_LE, 65_536, seeded(1))
    placed_LP = even_placement(NUM_EXPERTS, NUM_EXPERTS, NUM_RANKS)[None]
    table_Lp = table_here(0)[:1]
    ranks = play_ranks(
        known.counts_LE, placed_LP, table_Lp, num_ranks=NUM_RANKS, num_here=NUM_HERE, top_k=TOP_K
    )
    size = NUM_EXPERTS // NUM_RANKS
    busiest = int(ranks.ranks_Lr[0, 0])
    own = known.counts_LE[0, busiest * size : (busiest + 1) * size] / 65_536 * 2
    assert ranks.moved == 0.0
    np.testing.assert_allclose(ranks.chance_Lp[0, :size], np.sort(own), rtol=1e-9)
    ids = sampled_experts(
        chances_of(ranks.chance_Lp[0], table_Lp[0].tolist(), TOP_K), 65_536, TOP_K, seeded(2)
    )
    counts = torch.bincount(ids.flatten(), minlength=NUM_EXPERTS // 2)[:size] / 65_536
    np.testing.assert_allclose(counts.numpy(), np.sort(own), rtol=0.05)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    spare=st.sampled_from([0, 2, 4]),
    sigma=st.floats(0.0, 1.6),
)
def test_chances_keep_the_rows_of_ranks_whatever_the_load(
    seed: int, spare: int, sigma: float
) -> None:
    random = np.random.default_rng(seed)
    counts_LE = 1 + (1e4 * np.exp(random.normal(0.0, sigma, (1, NUM_EXPERTS)))).astype(np.int64)
    num_slots = NUM_EXPERTS + spare * NUM_RANKS
    placed_LP = even_placement(NUM_EXPERTS, num_slots, NUM_RANKS)[None]
    table_Lp = table_here(spare * NUM_HERE)[:1]
    try:
        ranks = play_ranks(
            counts_LE, placed_LP, table_Lp, num_ranks=NUM_RANKS, num_here=NUM_HERE, top_k=TOP_K
        )
    except ConfigError:
        assert sigma > 1.2, "of such a load no rank can be played"
        return
    rows_R = ranks.rows_LR[0]
    assert rows_R.mean() == pytest.approx(1.0)
    assert ranks.played_Lr[0].sum() == pytest.approx(NUM_HERE)
    by_rank_r = ranks.chance_Lp[0].reshape(NUM_HERE, -1).sum(axis=1) * NUM_HERE / TOP_K
    assert by_rank_r[0] == pytest.approx(rows_R.max())
    np.testing.assert_allclose(by_rank_r, ranks.played_Lr[0])
    chance_Ce = chances_of(ranks.chance_Lp[0], table_Lp[0].tolist(), TOP_K)
    np.testing.assert_allclose(chance_Ce.sum(dim=1), TOP_K)
    # In the mean over tokens, by expert.
    mean_e = np.bincount(table_Lp[0], ranks.chance_Lp[0])
    np.testing.assert_allclose(chance_Ce.mean(dim=0), mean_e)


@given(seed=st.integers(0, 2**32 - 1))
def test_the_busiest_is_played_and_least_is_scaled(seed: int) -> None:
    rows_R = np.random.default_rng(seed).gamma(4.0, size=NUM_RANKS)
    rows_R /= rows_R.mean()
    first, *others = choose_ranks(rows_R, NUM_HERE)
    assert first == rows_R.argmax()
    assert len({first, *others}) == NUM_HERE
    left = NUM_HERE - rows_R[first]
    chosen = abs(rows_R[others].sum() - left)
    rest = [rank for rank in range(NUM_RANKS) if rank != first]
    lightest_first = sorted(rest, key=lambda rank: rows_R[rank])
    for three in (lightest_first[:3], lightest_first[2:5], lightest_first[-3:]):
        assert chosen <= abs(rows_R[three].sum() - left) + 1e-12


def test_experts_of_a_token_differ_and_come_as_often_as_they_should() -> None:
    chance_Ce = torch.tensor([[0.95, 0.8, 0.75, 0.3, 0.2], [0.1, 0.8, 0.9, 0.9, 0.3]]).double()
    ids = sampled_experts(chance_Ce, 40_000, 3, seeded(4))
    assert ids.shape == (40_000, 3)
    assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
    for number in range(2):
        share = torch.bincount(ids[number::2].flatten(), minlength=5) / 20_000
        torch.testing.assert_close(share.double(), chance_Ce[number], atol=0.012, rtol=0.0)


def test_a_token_goes_to_ranks_beside_its_own() -> None:
    """Experts 0 to 7 in order on four ranks; tokens of all ranks alike."""
    ids_LTK = torch.tensor([[[0, 1], [2, 7]], [[0, 7], [3, 4]]])
    table_LP = np.tile(np.arange(8), (2, 1))
    assert other_ranks(ids_LTK, table_LP, 4) == pytest.approx((1 + 2 + 2 + 2) / 4 * 3 / 4)


def test_order_of_a_token_s_experts_says_nothing_of_their_neighbours() -> None:
    """Neighbours are chosen together, as they would not be by a systematic sample in order."""
    ids = sampled_experts(torch.full((1, 16), 0.25).double(), 20_000, 4, seeded(4))
    chosen = torch.zeros(20_000, 16).scatter_(1, ids, 1.0)
    together: Tensor = chosen.T @ chosen / 20_000
    apart = together[~torch.eye(16, dtype=torch.bool)]
    assert 0.03 < float(apart.min()) <= float(apart.max()) < 0.075  # 0.25 * 3 / 15 = 0.05


def test_planned_and_recorded_are_faster_by_the_model_and_say_what_travel_is_missing() -> None:
    log_LE = torch.from_numpy(log_likelihoods(NUM_LAYERS, NUM_EXPERTS, seed=3))
    config = replace(TINY, hidden_size=7168, moe_intermediate_size=2048)
    sample = sample_whole(TINY, log_LE, 32_768, seeded(1))
    served = trace_of(config, sample.counts_LE, num_ranks=NUM_RANKS, num_tokens=131_072)
    ms = {}
    for plays in (Plays.IN_ORDER, Plays.RECORDED, Plays.PLANNED):
        placed_LP = place_experts(plays, served, num_slots=NUM_EXPERTS, num_ranks=NUM_RANKS)
        told = describe_times(
            served,
            placed_LP,
            {"whole_other_ranks_of_a_token": 3.5, "other_ranks_of_a_token": 2.5},
            NUM_RANKS,
        )
        ms[plays] = told["modelled_experts_ms_of_h200"]
        # 21.7 KB of one rank's 16,384 tokens to one rank more, at 390 GB/s, in two layers.
        missing = told["modelled_travel_missing_ms_of_h200"]
        assert missing == pytest.approx(2 * 16_384 * 0.056e-3, rel=0.02)
    assert ms[Plays.RECORDED] < 0.9 * ms[Plays.IN_ORDER]  # type: ignore[operator]
    assert ms[Plays.PLANNED] < 0.9 * ms[Plays.IN_ORDER]  # type: ignore[operator]


PLAYING = Setup(dp=4, shard_of=8, shard_axis=Axis.DP, routing=Routing.SKEWED, plays=Plays.RECORDED)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"routing": Routing.UNIFORM}, "play-ranks"),
        ({"shard_of": 4}, "play-ranks"),
        ({"shard_of": 0}, "play-ranks"),
        ({"dp": 1}, "play-ranks"),
        ({"settings": ("prefill.expert_load=a.npz",)}, "--set"),
        ({"settings": ("prefill.rebalance_experts=on",)}, "--set"),
    ],
)
def test_what_cannot_be_played_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = "):
        replace(PLAYING, **changes)  # type: ignore[arg-type]


def test_a_label_and_notes_say_what_is_played() -> None:
    options = PrefillOptions(setup=replace(PLAYING, settings=("prefill.num_redundant_experts=16",)))
    measured = choose_model(options.setup)
    said = "the busiest of 8 ranks among those played, experts placed by a recording"
    assert said in measured.label
    notes = "; ".join(left_out(measured, options.setup, "prefill"))
    assert "rank 0 gets the rows of the busiest of 8 ranks" in notes
    assert "scaled so that a token has 8 experts" in notes
    assert "uniform routing" not in notes
