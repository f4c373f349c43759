"""Behind steps of prompts: what the layer for multi-token prediction keeps, and what it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boot.build import build_kv_pool, build_model
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import RankGroup
from engine.pending_step import StepResult
from engine.prompt_drafts import PromptDrafts
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.inputs import SamplingInput
from engine.sampling.sampler import Sampler
from engine.step_error import StepError
from runtime.sampling import SamplingParams
from tests.engine.model.test_mtp import part_of
from tests.engine.tiny import write_checkpoint

VOCAB, BLOCK_SIZE = 128, 64
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.9, seed=6, top_p=0.8, frequency_penalty=0.5, logit_bias={3: 4.0}),
    SamplingParams(temperature=0.0, repetition_penalty=1.7),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV3ForCausalLM:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("mtp")), with_mtp=True)


@dataclass
class Prefill:
    """A rank that runs prompts in chunks and drafts behind them."""

    model: DeepseekV3ForCausalLM
    pool: KVPool = field(init=False)
    runner: ModelRunner = field(init=False)

    def __post_init__(self) -> None:
        self.pool, sampler = build_kv_pool(self.model, 16), Sampler(VOCAB)
        drafts = PromptDrafts(
            model=self.model, kv_pool=self.pool, sampler=sampler, group=RankGroup()
        )
        self.runner = ModelRunner(self.model, self.pool, sampler, drafts=drafts)

    def step(self, *chunks: tuple[Request, int]) -> list[StepResult]:
        scheduled = [ScheduledRequest(request, count) for request, count in chunks]
        results = self.runner.execute(scheduled)
        for request, count in chunks:
            request.num_computed_tokens += count
        return results


def request_of(tokens: list[int], sampling: SamplingParams, first_block: int) -> Request:
    request = Request(request_id="r", prompt_token_ids=tokens, sampling=sampling)
    request.block_table = [first_block, first_block + 1, first_block + 2]
    return request


@torch.inference_mode()
def expected_draft(
    model: DeepseekV3ForCausalLM, request: Request, first: int
) -> tuple[int, torch.Tensor]:
    """The draft, and the layer's KV [3, BLOCK_SIZE, ...], of the whole prompt in one piece."""
    pool = build_kv_pool(model, 4)
    tokens = request.prompt_token_ids
    batch = part_of(tokens, 0, len(tokens))
    hidden = model(batch, pool)
    next_ids = torch.tensor([*tokens[1:], first])
    drafted = model.forward_mtp(hidden, next_ids, batch, pool)
    row = SamplingInput(request.sampling, tokens, [first])
    [token] = Sampler(VOCAB).sample(model.compute_logits(drafted[-1:]), [row])
    return token.token_id, pool.data[1:4, pool.num_layers - 1]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=2, max_size=3),
    chunk=st.sampled_from([1, 7, 64, 65, 1000]),
    draw=st.randoms(use_true_random=False),
    kinds=st.lists(st.sampled_from(SAMPLINGS), min_size=3, max_size=3),
)
def test_chunks_of_any_mix_draft_what_whole_prompts_do(
    model: DeepseekV3ForCausalLM,
    lengths: list[int],
    chunk: int,
    draw: Random,
    kinds: list[SamplingParams],
) -> None:
    """Also those of exactly whole blocks, and with penalties, which count the first token."""
    if chunk == 1:
        lengths = [min(length, 9) for length in lengths]
    prefill = Prefill(model)
    requests = [
        request_of([draw.randrange(VOCAB) for _ in range(length)], kind, 1 + 3 * place)
        for place, (length, kind) in enumerate(zip(lengths, kinds, strict=False))
    ]
    found: dict[int, StepResult] = {}
    while open_ones := [item for item in requests if item.num_uncomputed_tokens]:
        counts = [min(chunk, item.num_uncomputed_tokens) for item in open_ones]
        for result in prefill.step(*zip(open_ones, counts, strict=True)):
            if result.sampled is None:
                assert result.draft is None
            else:
                found[id(result.request)] = result
    for place, request in enumerate(requests):
        result = found[id(request)]
        assert result.sampled is not None
        draft, kept = expected_draft(model, request, result.sampled.token_id)
        assert result.draft == draft
        first, length = 1 + 3 * place, request.num_prompt_tokens
        ours = prefill.pool.data[first : first + 3, prefill.pool.num_layers - 1]
        rows = [part.flatten(0, 1)[:length] for part in (ours, kept)]
        torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_tokens_are_there_before_their_drafts(model: DeepseekV3ForCausalLM) -> None:
    """Read in two parts a step gives what it gives in one; where nothing samples there is one."""
    prefill, tokens = Prefill(model), list(range(20))
    apart, whole = (request_of(tokens, SAMPLINGS[1], first) for first in (1, 4))
    begun = prefill.runner.launch([ScheduledRequest(apart, 12)])
    assert begun.collect_sampled() is None
    begun.collect()
    apart.num_computed_tokens = 12
    pending = prefill.runner.launch([ScheduledRequest(apart, 8)])
    sampled = pending.collect_sampled()
    assert sampled is not None
    assert sampled[0].draft is None
    [result] = pending.collect()
    [expected] = prefill.step((whole, 20))
    assert result.sampled == sampled[0].sampled == expected.sampled
    assert result.draft == expected.draft is not None


@pytest.mark.parametrize(
    ("num_prompt", "num_cached"), [(128, 64), (129, 128), (127, 64), (150, 128)]
)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_behind_a_cached_prefix_the_draft_is_that_of_the_whole_prompt(
    model: DeepseekV3ForCausalLM, num_prompt: int, num_cached: int, kind: SamplingParams
) -> None:
    """Prompts of exactly two blocks, one token less, one more, and some more."""
    draw = Random(num_prompt)
    tokens = [draw.randrange(VOCAB) for _ in range(num_prompt)]
    prefill = Prefill(model)
    # Another prompt with the same beginning came before: to the first token behind what is cached.
    before = request_of([*tokens[: num_cached + 1], 5, 6], SAMPLINGS[0], 1)
    prefill.step((before, num_cached + 3))
    request = request_of(tokens, kind, 4)
    num_shared = num_cached // BLOCK_SIZE
    request.block_table[:num_shared] = before.block_table[:num_shared]
    request.num_computed_tokens = request.num_cached_tokens = num_cached
    [result] = prefill.step((request, num_prompt - num_cached))
    assert result.sampled is not None
    draft, kept = expected_draft(model, request, result.sampled.token_id)
    assert result.draft == draft
    ours = prefill.pool.data[request.block_table, prefill.pool.num_layers - 1]
    rows = [part.flatten(0, 1)[:num_prompt] for part in (ours, kept)]
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-4, atol=1e-4)


def test_ranks_that_wait_for_a_step_that_cannot_sample_are_met(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run the layer behind the step, whatever becomes of it here."""
    prefill = Prefill(model)
    met: list[int] = []
    forward = model.forward_mtp
    monkeypatch.setattr(model, "forward_mtp", lambda *args: (met.append(1), forward(*args))[1])

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no memory for the logits")

    monkeypatch.setattr(model, "compute_logits", fail)
    request = request_of([1, 2, 3], SAMPLINGS[0], 1)
    with pytest.raises(StepError):
        prefill.step((request, 3))
    assert met == [1]
