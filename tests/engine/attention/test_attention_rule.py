"""The absorbed form is for few queries, and takes no more memory at a time than the rule says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import DEEPSEEK_V3
from engine.attention.attention_rule import ABSORBED_BYTES, AttentionRule
from engine.config import DeepseekV3Config

FULL = AttentionRule.of(DEEPSEEK_V3)
RULES = st.builds(
    AttentionRule,
    heads=st.integers(1, 128),
    nope=st.integers(1, 128),
    rope=st.integers(1, 64),
    value=st.integers(1, 128),
    latent=st.integers(1, 512),
    absorbed_cost=st.sampled_from([0.0, 0.5, 1.0, 1.7, float("inf")]),
    absorbed_bytes=st.integers(1, 1 << 30),
)


@given(rule=RULES, num_positions=st.integers(1, 200_000))
def test_the_most_queries_are_the_last_that_are_absorbed(
    rule: AttentionRule, num_positions: int
) -> None:
    most = rule.most_absorbed(num_positions)
    assert 0 <= most <= num_positions
    if most:
        assert rule.takes_absorbed(most, num_positions)
        assert rule.takes_absorbed((most + 1) // 2, num_positions)
    if most < num_positions:
        assert not rule.takes_absorbed(most + 1, num_positions)
        assert not rule.takes_absorbed(num_positions, num_positions)


@given(rule=RULES, num_positions=st.integers(1, 200_000))
def test_what_runs_at_once_fits_unless_it_is_one(rule: AttentionRule, num_positions: int) -> None:
    queries, tokens = rule.queries_at_once(num_positions), rule.tokens_at_once()
    assert queries == 1 or 8 * rule.heads * num_positions * queries <= rule.absorbed_bytes
    numbers = rule.nope + 2 * rule.rope + 2 * rule.latent + rule.value
    assert tokens == 1 or 2 * rule.heads * numbers * tokens <= rule.absorbed_bytes
    assert min(queries, tokens) >= 1


@pytest.mark.parametrize(("num_positions", "most"), [(300, 108), (8192, 167), (163_840, 170)])
def test_at_full_size_few_new_tokens_are_absorbed(num_positions: int, most: int) -> None:
    assert FULL.most_absorbed(num_positions) == most


def test_at_full_size_nothing_is_too_small_to_be_worth_a_call() -> None:
    assert FULL.tokens_at_once() > 4 * FULL.most_absorbed(163_840)
    assert FULL.queries_at_once(163_840) == 1
    assert 8 * FULL.heads * 163_840 < ABSORBED_BYTES
    assert AttentionRule.of(DEEPSEEK_V3, tp=8).queries_at_once(163_840) == 12


def test_heads_are_those_of_a_rank() -> None:
    assert AttentionRule.of(DEEPSEEK_V3, tp=8).heads == 16
    assert isinstance(DEEPSEEK_V3, DeepseekV3Config)
