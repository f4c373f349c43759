"""Rehearsed steps are as large as can come, run in every way, and leave no trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import kv_size
from engine.build import build_kv_pool, build_model
from engine.config import ModelConfig
from engine.kv_size import agree_on_least, choose_num_blocks, largest_step, largest_steps
from engine.layers.attention_rule import AttentionRule
from engine.memory.kv_budget import MemorySums
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import ProcessGroups
from engine.rehearsal import (
    SHORT_CONTEXT,
    absorbed_prefill,
    largest_decode,
    largest_prefill,
    rehearse,
    sampled_prefill,
    smaller_prefills,
)
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.shapes import DEEPSEEK_V3
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config

BLOCK_SIZE, MAX_MODEL_LEN = 8, 60


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return build_model(ModelConfig.from_hf(tiny_config()), load_format="dummy")


def test_the_largest_prefill_fills_the_budget_at_the_end_of_a_context() -> None:
    step = largest_prefill(max_num_tokens=150, max_num_seqs=8, max_model_len=60, block_size=8)
    assert [item.num_scheduled_tokens for item in step] == [60, 60, 30]
    assert [item.end for item in step] == [60, 60, 30]
    assert all(item.samples for item in step)
    (chunk,) = largest_prefill(max_num_tokens=16, max_num_seqs=8, max_model_len=60, block_size=8)
    assert (chunk.start, chunk.end, chunk.samples) == (44, 60, True)
    few = largest_prefill(max_num_tokens=150, max_num_seqs=2, max_model_len=60, block_size=8)
    assert len(few) == 2


FULL = AttentionRule.of(DEEPSEEK_V3)


@given(
    max_num_tokens=st.integers(1, 3000),
    max_num_seqs=st.integers(1, 40),
    max_model_len=st.integers(1, 20_000),
)
def test_short_suffixes_come_in_the_absorbed_form_up_to_the_longest_context(
    max_num_tokens: int, max_num_seqs: int, max_model_len: int
) -> None:
    step = absorbed_prefill(
        FULL,
        max_num_tokens=max_num_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=64,
    )
    counts = [item.num_scheduled_tokens for item in step]
    assert 0 < sum(counts) <= max_num_tokens
    assert len(step) <= max_num_seqs
    first, *others = step
    assert first.end == max_model_len
    assert counts[0] == min(max_num_tokens, FULL.most_absorbed(max_model_len))
    absorbed = [item for item in others if item.start]
    assert all(item.end == min(max_model_len, SHORT_CONTEXT) for item in absorbed)
    whole = [item for item in others if not item.start]
    assert all(item is step[-1] or item.end <= SHORT_CONTEXT for item in whole)


def test_suffixes_use_up_what_the_rule_allows_at_a_time() -> None:
    step = absorbed_prefill(
        FULL, max_num_tokens=16_384, max_num_seqs=64, max_model_len=163_840, block_size=64
    )
    absorbed = [item.num_scheduled_tokens for item in step if item.start]
    assert sum(absorbed) > 4 * FULL.tokens_at_once()
    assert sum(item.num_scheduled_tokens for item in step) == 16_384


def test_a_rule_that_never_absorbs_leaves_a_prompt() -> None:
    never = AttentionRule.of(DEEPSEEK_V3, absorbed_cost=float("inf"))
    (item,) = absorbed_prefill(
        never, max_num_tokens=100, max_num_seqs=1, max_model_len=60, block_size=8
    )
    assert (item.start, item.end) == (0, 60)


@pytest.mark.parametrize("most", [1, 2, 100, 128])
def test_smaller_prefills_come_to_every_power_of_two(most: int) -> None:
    steps = smaller_prefills(max_num_tokens=most, max_num_seqs=8, max_model_len=60, block_size=8)
    sizes = [sum(item.num_scheduled_tokens for item in step) for step in steps]
    assert sizes == [size for size in (1, 2, 4, 8, 16, 32, 64) if size < most]
    assert all(item.start == 0 for step in steps for item in step), "no context is before them"


@pytest.mark.parametrize(
    "step",
    [
        largest_prefill(max_num_tokens=100, max_num_seqs=4, max_model_len=60, block_size=8),
        largest_prefill(max_num_tokens=16, max_num_seqs=4, max_model_len=60, block_size=8),
        largest_decode(max_num_seqs=5, max_model_len=60, block_size=8),
        sampled_prefill(8),
        absorbed_prefill(FULL, max_num_tokens=100, max_num_seqs=4, max_model_len=60, block_size=8),
    ],
)
@pytest.mark.parametrize("follows", [False, True])
def test_it_runs_over_two_blocks_and_leaves_the_second_alone(
    model: DeepseekV3ForCausalLM, step: list[ScheduledRequest], follows: bool
) -> None:
    pool = build_kv_pool(model, 2, block_size=BLOCK_SIZE)
    runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    rehearse(runner, step, follows=follows)
    assert bool(pool.data[0].any())
    assert not bool(pool.data[1].any())


def test_a_step_is_the_role_s_largest() -> None:
    prefill = largest_step(PrefillSection(max_num_batched_tokens=100, block_size=8), MAX_MODEL_LEN)
    assert sum(item.num_scheduled_tokens for item in prefill) == 100
    decode = largest_step(DecodeSection(max_num_seqs=7, block_size=8), MAX_MODEL_LEN)
    assert [item.num_scheduled_tokens for item in decode] == [1] * 7


def test_prefill_measures_both_forms_and_decode_its_own(model: DeepseekV3ForCausalLM) -> None:
    section = PrefillSection(max_num_batched_tokens=50, max_num_seqs=3, block_size=8)
    rule = model.attention_rule
    suffixes, prompts = largest_steps(section, rule, MAX_MODEL_LEN)
    assert prompts[0].num_scheduled_tokens == 50
    assert suffixes[0].num_scheduled_tokens == rule.most_absorbed(MAX_MODEL_LEN) < MAX_MODEL_LEN
    assert suffixes[0].end == MAX_MODEL_LEN
    decode = DecodeSection(max_num_seqs=7, block_size=8)
    assert len(largest_steps(decode, rule, MAX_MODEL_LEN)) == 1


def test_blocks_are_those_of_the_configuration_or_of_the_measured_device(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(section: DecodeSection) -> int:
        return choose_num_blocks(section, model, max_model_len=MAX_MODEL_LEN, kv_dtype=None)

    assert choose(DecodeSection(num_blocks=77)) == 77

    def measured(total: int) -> None:
        sums = MemorySums(
            total=total, used=100, graphs=10, activations=10, block_bytes=10, fraction=0.5
        )
        monkeypatch.setattr(kv_size, "_measure", lambda *_: sums)

    section = DecodeSection(num_blocks=0, device="cuda", block_size=8)
    measured(1000)
    assert choose(section) == 38
    measured(300)
    with pytest.raises(ConfigError, match="3 fit on the rank with the least room"):
        choose(section)


def test_one_rank_agrees_with_itself() -> None:
    assert agree_on_least(ProcessGroups(), 5) == 5
