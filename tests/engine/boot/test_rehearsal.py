"""Rehearsed steps are as large as can come, run in every way, and leave no trace."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import DEEPSEEK_V3
from engine.attention.attention_rule import AttentionRule
from engine.boot import kv_size
from engine.boot.build import build_kv_pool, build_model
from engine.boot.kv_size import (
    agree_on_least,
    choose_num_blocks,
    measure_memory,
)
from engine.boot.rehearsal import (
    SHORT_CONTEXT,
    absorbed_prefill,
    all_steps,
    largest_decode,
    largest_prefill,
    largest_steps,
    rehearse,
    sampled_prefill,
    smaller_prefills,
)
from engine.config import DeepseekV3Config
from engine.graphs.capture_errors import CaptureError
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import ChunkSteps, EngineOptions, KVOptions, Switch, TokenSteps
from engine.parallel.groups import ProcessGroups
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.streams import Streams
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config

BLOCK_SIZE, MAX_MODEL_LEN = 8, 60


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    return build_model(DeepseekV3Config.from_hf(tiny_config()), load_format="dummy")


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


@given(most=st.integers(1, 600), masked=st.integers(0, 600))
def test_short_steps_of_masked_rows_are_measured_at_their_largest(most: int, masked: int) -> None:
    options = EngineOptions(steps=ChunkSteps(max_num_batched_tokens=most))
    for rule in (None, FULL):
        steps = largest_steps(options, rule, 20_000, masked)
        plain = [FULL.most_absorbed(20_000), most][rule is None :]
        assert len(steps) == len(plain) + (0 < masked < most)
        sizes = [sum(item.num_scheduled_tokens for item in step) for step in steps]
        assert sizes[-1] == most
        assert (sizes[0] == masked) or not 0 < masked < most
        assert len(all_steps(options, rule, 20_000, masked)) > len(steps)


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


CHUNKS = EngineOptions(
    steps=ChunkSteps(max_num_batched_tokens=50), max_num_seqs=3, kv=KVOptions(block_size=8)
)
TOKENS = EngineOptions(steps=TokenSteps(), max_num_seqs=7, kv=KVOptions(block_size=8))


def test_chunks_measure_both_forms_and_tokens_their_own(model: DeepseekV3ForCausalLM) -> None:
    rule = model.attention_rule
    suffixes, prompts = largest_steps(CHUNKS, rule, MAX_MODEL_LEN)
    assert prompts[0].num_scheduled_tokens == 50
    assert suffixes[0].num_scheduled_tokens == rule.most_absorbed(MAX_MODEL_LEN) < MAX_MODEL_LEN
    assert suffixes[0].end == MAX_MODEL_LEN
    (tokens,) = largest_steps(TOKENS, rule, MAX_MODEL_LEN)
    assert [item.num_scheduled_tokens for item in tokens] == [1] * 7


def test_a_model_with_one_form_has_one_largest_step() -> None:
    wide = replace(CHUNKS, steps=ChunkSteps(max_num_batched_tokens=100))
    (step,) = largest_steps(wide, None, MAX_MODEL_LEN)
    assert sum(item.num_scheduled_tokens for item in step) == 100


def test_chunks_rehearse_every_size_and_tokens_the_largest_one(
    model: DeepseekV3ForCausalLM,
) -> None:
    sampled, *steps = all_steps(CHUNKS, model.attention_rule, MAX_MODEL_LEN)
    assert len(sampled) == len(sampled_prefill(8)) == 3
    counts = [sum(item.num_scheduled_tokens for item in step) for step in steps]
    assert counts[:6] == [1, 2, 4, 8, 16, 32]
    assert counts[6:] == [50, 50]
    assert len(all_steps(TOKENS, None, MAX_MODEL_LEN)) == 1


GIB = 2**30


@dataclass
class FakeDevice:
    """Its memory, in GiB; a step of prefill or decode takes 4, graphs take `graphs` or fail."""

    monkeypatch: pytest.MonkeyPatch
    free: float = 50.0
    graphs: int | RuntimeError = 2 * GIB
    activations: int | RuntimeError = 4 * GIB
    num_measured: int = 0

    def __post_init__(self) -> None:
        def measure(outcome: int | RuntimeError) -> int:
            self.num_measured += 1
            if isinstance(outcome, RuntimeError):
                raise outcome
            return outcome

        put = self.monkeypatch.setattr
        put(kv_size, "_memory", lambda _: (int(self.free * GIB), 100 * GIB))
        put(kv_size, "_peak_bytes", lambda *_: measure(self.activations))
        put(kv_size, "measure_graph_bytes", lambda *_, **__: measure(self.graphs))

    def choose(
        self,
        model: DeepseekV3ForCausalLM,
        steps: ChunkSteps | TokenSteps = TOKENS.steps,
        *,
        device: str = "cuda",
        max_num_seqs: int = 32,
        prefix: str = "decode.",
        **kv: Any,
    ) -> int:
        options = EngineOptions(
            steps=steps,
            device=device,
            max_num_seqs=max_num_seqs,
            kv=KVOptions(block_size=8, **kv),
            prefix=prefix,
        )
        sums = measure_memory(
            options, model, max_model_len=MAX_MODEL_LEN, streams=Streams(model.device)
        )
        return choose_num_blocks(options, ProcessGroups(), sums, max_model_len=MAX_MODEL_LEN)


@pytest.fixture
def block_bytes(model: DeepseekV3ForCausalLM) -> int:
    return build_kv_pool(model, 2, block_size=8).block_bytes


def test_a_cpu_takes_the_blocks_that_it_is_told(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch)
    assert device.choose(model, device="cpu", num_blocks=77) == 77
    assert device.num_measured == 0


def test_a_gpu_takes_as_many_blocks_as_fit(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    device = FakeDevice(monkeypatch)
    room = 50 - 10 - 2 - 4  # a tenth of the device is not ours
    taken = device.choose(model, num_blocks=0, gpu_memory_fraction=0.9)
    assert taken == room * GIB // block_bytes
    device.free = 16.0
    with pytest.raises(ConfigError, match="0 fit on the rank with the least room"):
        device.choose(model, num_blocks=0, gpu_memory_fraction=0.9)


def test_few_blocks_need_no_measuring_and_many_are_checked(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    device = FakeDevice(monkeypatch)
    half = 25 * GIB // block_bytes
    assert device.choose(model, num_blocks=half - 1) == half - 1
    assert device.num_measured == 0
    fitting = (50 - 2 - 4) * GIB // block_bytes
    assert device.choose(model, num_blocks=fitting) == fitting
    assert device.num_measured == 2
    with pytest.raises(ConfigError) as caught:
        device.choose(model, num_blocks=fitting + 1)
    assert (caught.value.path, caught.value.value) == ("decode.num_blocks", fitting + 1)
    assert caught.value.fix == f"{fitting} or less, or 0 for as many as fit"
    device.free = 5.0
    with pytest.raises(ConfigError, match=r"Fix: 0, and more ranks, or a decode\.max_num_seqs"):
        device.choose(model, num_blocks=fitting)


def test_a_step_that_cannot_be_captured_takes_no_memory_unless_it_has_to_be(
    model: DeepseekV3ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = FakeDevice(monkeypatch, graphs=CaptureError("not permitted when stream is capturing"))
    assert device.choose(model, num_blocks=0, gpu_memory_fraction=1.0) == 46 * GIB // block_bytes
    assert "steps cannot be captured" in caplog.text
    with pytest.raises(ConfigError, match="cuda_graphs = 'on': not permitted"):
        device.choose(model, TokenSteps(cuda_graphs=Switch.ON), num_blocks=0)


@pytest.mark.parametrize("num_blocks", [0, 10**9])
def test_steps_that_do_not_fit_without_kv_are_refused(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    device = FakeDevice(monkeypatch, graphs=no_memory)
    with pytest.raises(
        ConfigError, match=r"max_num_seqs = 9: the captured steps ran out"
    ) as caught:
        device.choose(model, num_blocks=num_blocks, max_num_seqs=9)
    assert caught.value.fix == "4 or less, or more ranks"
    device = FakeDevice(monkeypatch, activations=no_memory)
    with pytest.raises(ConfigError, match=r"the largest step ran out of the 50\.00 GiB"):
        device.choose(model, num_blocks=num_blocks)
    chunks = ChunkSteps(max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match=r"prefill.max_num_batched_tokens = 100: .*Fix: 50 or"):
        device.choose(model, chunks, num_blocks=num_blocks, prefix="prefill.")


def test_a_device_that_fails_while_graphs_are_measured_is_not_served_without(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(monkeypatch, graphs=RuntimeError("CUDA error: misaligned address"))
    with pytest.raises(ConfigError, match="the device failed while steps were captured"):
        device.choose(model, num_blocks=0)
    device.graphs = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        device.choose(model, num_blocks=0)


def test_one_rank_agrees_with_itself() -> None:
    assert agree_on_least(ProcessGroups(), 5) == 5
