"""A request that goes on at another pair, after any number of tokens, ends with the same text.

The model is real: its KV comes from a prefill of prompt and output so far, which no step has run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decode.frames import Delta
from decode.requests import DecodeRequest
from decode.scheduler import StepPlan
from engine.boot.build import build_model
from engine.generate import GenerateOutput, generate
from engine.graphs.graph_runner import capture_steps
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.inputs import SampledToken
from engine.sampling.sampler import Sampler
from runtime.sampling import FinishReason, PositionLogprobs, SamplingParams
from tests.decode.helpers import BLOCK_SIZE
from tests.decode.test_rank import Bench
from tests.engine.tiny import tiny_config, write_checkpoint

PROMPT = [2 + (index * 17) % 120 for index in range(9)]
NUM_TOKENS = 7
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    "everything": SamplingParams(
        temperature=0.8,
        top_p=0.97,
        seed=5,
        repetition_penalty=1.3,
        presence_penalty=0.6,
        frequency_penalty=0.9,
        logit_bias={7: 2.0},
        num_logprobs=3,
        max_tokens=NUM_TOKENS,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV3ForCausalLM:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, tiny_config(), seed=3)
    return build_model(Path(folder))


class Pair:
    """A decode rank, and a prefill that writes straight into its blocks."""

    def __init__(self, model: DeepseekV3ForCausalLM, *, graphs: bool) -> None:
        config = model.config
        self.pool = KVPool(33, config.num_kv_layers(), BLOCK_SIZE, config.kv_spec)
        self.prefill = ModelRunner(model, self.pool, Sampler(config.vocab_size))
        self.decode = self.prefill
        if graphs:
            runner = ModelRunner(model, self.pool, Sampler(config.vocab_size))
            self.decode = capture_steps(runner, max_num_seqs=2, max_model_len=128)  # type: ignore[assignment]
        self.bench = Bench(32, kv=self.pool, caching=True)

    def run(self, params: SamplingParams, so_far: list[int]) -> list[Delta]:
        """What the router hears: prefill's token, and then the frames."""
        request = self.bench.make(len(PROMPT), num_output=len(so_far))
        request.request.prompt_token_ids[:] = PROMPT
        request.request.output_token_ids[:] = so_far
        request.request.sampling = params
        self.bench.rank.reserve(request)
        self.bench.claim(request)
        first = self._compute(request)
        self.bench.arrive(request, first_token=first.token_id)
        deltas = [_delta_of(request, first)]
        while not self.bench.rank.is_empty:
            plan = self.bench.rank.plan_step()
            self.bench.rank.complete_step(plan, self._step(plan))
            for news in self.bench.rank.news.take().values():
                deltas += news
        self.bench.check_empty()
        return [delta for delta in deltas if not delta.is_silent]

    def _compute(self, request: DecodeRequest) -> SampledToken:
        inner = request.request
        twin = Request(
            request_id="prefill",
            prompt_token_ids=list(inner.prompt_token_ids),
            output_token_ids=list(inner.output_token_ids),
            sampling=inner.sampling,
            block_table=list(inner.block_table),
            num_computed_tokens=inner.num_cached_tokens,
        )
        num_new = twin.num_context_tokens - twin.num_computed_tokens
        (result,) = self.prefill.execute([ScheduledRequest(twin, num_new)])
        assert result.sampled is not None
        return result.sampled

    def _step(self, plan: StepPlan) -> list[tuple[SampledToken, ...]]:
        if not plan.scheduled:
            return []
        pending = self.decode.launch(plan.scheduled)
        return [result.tokens for result in pending.collect()]


def _delta_of(request: DecodeRequest, first: SampledToken) -> Delta:
    return Delta(
        request_id=request.request_id,
        start_index=request.first_index,
        token_ids=(first.token_id,),
        logprobs=() if first.logprobs is None else (first.logprobs,),
    )


def close_to(left: PositionLogprobs, right: PositionLogprobs) -> bool:
    return left.top_ids == right.top_ids and left.logprob == pytest.approx(right.logprob, abs=1e-4)


def check(pair: Pair, params: SamplingParams, whole: GenerateOutput) -> None:
    """For every number of tokens that an earlier try gave."""
    for count in range(len(whole.token_ids)):
        deltas = pair.run(params, whole.token_ids[:count])
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == whole.token_ids[count:], f"after {count} tokens"
        assert [delta.start_index for delta in deltas] == list(range(count, count + len(deltas)))
        if len(deltas) > 1:
            assert deltas[-1].finish_reason is whole.finish_reason
        logprobs = [item for delta in deltas for item in delta.logprobs]
        assert len(logprobs) == len(whole.logprobs[count:])
        assert all(map(close_to, logprobs, whole.logprobs[count:]))


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_the_tokens_that_follow_are_those_of_an_undisturbed_request(
    model: DeepseekV3ForCausalLM, name: str, graphs: bool
) -> None:
    params = PARAMS[name]
    (whole,) = generate(model, [PROMPT], params)
    assert len(whole.token_ids) == NUM_TOKENS
    check(Pair(model, graphs=graphs), params, whole)


def test_stop_tokens_and_min_tokens_count_all_output(model: DeepseekV3ForCausalLM) -> None:
    free_params = SamplingParams(temperature=0.9, seed=11, max_tokens=9)
    (free,) = generate(model, [PROMPT], free_params)
    # The first is masked where it would come; the second ends the request.
    masked_params = replace(free_params, min_tokens=4, stop_token_ids=(free.token_ids[2],))
    (masked,) = generate(model, [PROMPT], masked_params)
    stops = (free.token_ids[2], masked.token_ids[6])
    params = replace(masked_params, stop_token_ids=stops)
    (whole,) = generate(model, [PROMPT], params)
    assert 4 < len(whole.token_ids) < 9
    assert whole.finish_reason is FinishReason.STOP
    check(Pair(model, graphs=False), params, whole)
