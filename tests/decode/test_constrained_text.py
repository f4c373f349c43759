"""Structured output of the bundled model is one text, however it is computed.

In one process; with prefill apart; after an earlier try (another pair, a dead worker) gave any
number of its tokens; with steps launched ahead; with KV that went to host memory in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from decode.frames import Delta
from decode.requests import DecodeRequest
from decode.scheduler import StepPlan
from engine.boot.build import build_model
from engine.generate import GenerateOutput, generate
from engine.graphs.graph_runner import GraphRunner, capture_steps
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.pending_step import PendingStep
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from grammar.constraints import AnyMatcher, Constraints
from runtime.sampling import FinishReason, OutputConstraint, SamplingParams
from tests.decode.helpers import BLOCK_SIZE
from tests.decode.test_rank import Bench
from tests.grammar.schemas import EOS, MODEL_DIR, VOCAB, grammar_of
from worker.lifecycle import DecodeStatus

pytestmark = pytest.mark.slow

PROMPT = [300 + (index * 91) % 3000 for index in range(9)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{3,8}$"},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
        "kind": {"enum": ["one", "two"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
THINK_END = (6,)
JSON_ONLY = OutputConstraint(grammar=grammar_of(SCHEMA))
GUARDED = OutputConstraint(grammar=JSON_ONLY.grammar, is_guarded=True)
THOUGHTFUL = OutputConstraint(
    grammar=JSON_ONLY.grammar, starts_after=THINK_END, max_tokens_before=5
)
PARAMS = {
    "greedy": SamplingParams(
        temperature=0.0, max_tokens=90, stop_token_ids=(EOS,), constraint=JSON_ONLY
    ),
    "everything": SamplingParams(
        temperature=0.9,
        top_p=0.97,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={700: 3.0},
        num_logprobs=2,
        max_tokens=90,
        constraint=JSON_ONLY,
    ),
    "guarded": SamplingParams(
        temperature=1.1, seed=3, repetition_penalty=1.1, max_tokens=90, constraint=GUARDED
    ),
    "thoughtful": SamplingParams(
        temperature=1.0, seed=8, max_tokens=90, stop_token_ids=(EOS,), constraint=THOUGHTFUL
    ),
}


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    torch.set_num_threads(1)
    return build_model(MODEL_DIR)


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(MODEL_DIR, VOCAB)
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(model: DeepseekV3ForCausalLM, constraints: Constraints) -> dict[str, GenerateOutput]:
    """By the name of the parameters, in one process."""
    return {
        name: generate(model, [PROMPT], params, constraints=constraints)[0]
        for name, params in PARAMS.items()
    }


class Pair:
    """A decode rank that runs steps ahead or not, and a prefill that writes into its blocks."""

    def __init__(
        self,
        model: DeepseekV3ForCausalLM,
        constraints: Constraints,
        *,
        graphs: bool = False,
        ahead: bool = False,
    ) -> None:
        config = model.config
        self.pool = KVPool(64, config.num_kv_layers(), BLOCK_SIZE, config.kv_spec)
        self.prefill = ModelRunner(model, self.pool, Sampler(config.vocab_size))
        self.decode: ModelRunner | GraphRunner = self.prefill
        if graphs:
            plain = ModelRunner(model, self.pool, Sampler(config.vocab_size))
            self.decode = capture_steps(plain, max_num_seqs=4, max_model_len=200)
        self.bench = Bench(63, kv=self.pool, caching=True)
        self.constraints, self.ahead = constraints, ahead
        self.deltas: dict[str, list[Delta]] = {}
        self.in_flight: list[tuple[StepPlan, PendingStep]] = []

    def begin(self, params: SamplingParams, so_far: list[int]) -> DecodeRequest:
        """Until the KV is here."""
        rank = self.bench.rank
        request = self.bench.make(len(PROMPT), num_output=len(so_far))
        inner = request.request
        inner.prompt_token_ids[:], inner.output_token_ids[:] = PROMPT, so_far
        inner.sampling = params
        rank.reserve(request)
        rank.matched(request, self._matching(params, so_far))
        self.bench.claim(request)
        self.deltas[request.request_id] = []
        self.first = self._compute(request)
        self.bench.arrive(request, first_token=self.first)
        return request

    def turn(self) -> None:
        """Plan, launch, and read what need not run any more."""
        plan = self.bench.rank.plan_step(self._land)
        if plan.scheduled:
            after = self.in_flight[-1][1] if self.in_flight else None
            self.in_flight.append((plan, self.decode.launch(plan.scheduled, after=after)))
        self._land(1 if self.ahead and plan.scheduled else 0)

    def finish(self) -> None:
        while not self.bench.rank.is_empty:
            self.turn()
        self.bench.check_empty()

    def _land(self, num_left: int = 0) -> None:
        while len(self.in_flight) > num_left:
            plan, pending = self.in_flight.pop(0)
            results = pending.collect()
            self.bench.rank.complete_step(plan, [result.tokens for result in results])
        for news in self.bench.rank.news.take().values():
            for delta in news:
                self.deltas[delta.request_id].append(delta)

    def _matching(self, params: SamplingParams, so_far: list[int]) -> Future[AnyMatcher | None]:
        made = self.constraints.begin(params, so_far)
        made.result()
        return made

    def _compute(self, request: DecodeRequest) -> int:
        inner = request.request
        twin = Request(
            request_id="prefill",
            prompt_token_ids=list(inner.prompt_token_ids),
            output_token_ids=list(inner.output_token_ids),
            sampling=inner.sampling,
            block_table=list(inner.block_table),
            num_computed_tokens=inner.num_cached_tokens,
            matcher=self.constraints.begin(inner.sampling, inner.output_token_ids).result(),
        )
        num_new = twin.num_context_tokens - twin.num_computed_tokens
        (result,) = self.prefill.execute([ScheduledRequest(twin, num_new)])
        assert result.sampled is not None
        return result.sampled.token_id

    def tokens(self, request: DecodeRequest) -> list[int]:
        deltas = self.deltas[request.request_id]
        return [token for delta in deltas for token in delta.token_ids]

    def reason(self, request: DecodeRequest) -> FinishReason | None:
        return self.deltas[request.request_id][-1].finish_reason


@pytest.mark.parametrize("name", PARAMS)
def test_the_text_is_an_instance_of_the_schema(whole: dict[str, GenerateOutput], name: str) -> None:
    output = whole[name]
    assert output.finish_reason is FinishReason.COMPLETE
    tokens = output.token_ids
    if PARAMS[name].constraint is THOUGHTFUL:
        assert tokens.index(*THINK_END) <= 5
        tokens = tokens[tokens.index(*THINK_END) + 1 :]
    text = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).decode(tokens)
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_what_follows_an_earlier_try_is_the_rest_of_the_text(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    *,
    name: str,
    graphs: bool,
    ahead: bool,
) -> None:
    tokens = whole[name].token_ids
    pair = Pair(model, constraints, graphs=graphs, ahead=ahead)
    for count in (0, len(tokens) // 2):
        request = pair.begin(PARAMS[name], tokens[:count])
        first = pair.first
        pair.finish()
        assert [first, *pair.tokens(request)] == tokens[count:], f"after {count} tokens"
        assert pair.reason(request) is FinishReason.COMPLETE


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_requests_side_by_side_have_the_text_that_each_has_alone(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    graphs: bool,
) -> None:
    """One of them without a constraint, which is not touched by the others' masks."""
    free = SamplingParams(temperature=1.0, seed=77, max_tokens=40)
    (alone,) = generate(model, [PROMPT], free)
    pair = Pair(model, constraints, graphs=graphs, ahead=True)
    wanted = [(PARAMS[name], whole[name].token_ids) for name in PARAMS]
    wanted.append((free, alone.token_ids))
    begun = [(pair.begin(params, []), pair.first, tokens) for params, tokens in wanted]
    pair.finish()
    for request, first, tokens in begun:
        assert [first, *pair.tokens(request)] == tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
def test_a_request_that_was_in_host_memory_goes_on_with_its_text(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    ahead: bool,
) -> None:
    pair = Pair(model, constraints, ahead=ahead)
    request = pair.begin(PARAMS["everything"], [])
    first = pair.first
    for _ in range(4):
        pair.turn()
    blocks = pair.bench.pool
    held = blocks.allocate(blocks.num_free_blocks)
    while request.status is not DecodeStatus.PREEMPTED:
        pair.turn()
    blocks.release(held)
    assert 4 < len(pair.tokens(request)) + 1 < len(whole["everything"].token_ids)
    pair.finish()
    assert [first, *pair.tokens(request)] == whole["everything"].token_ids


def test_no_token_but_the_stops_changes_where_nothing_is_ruled_out(
    model: DeepseekV3ForCausalLM, constraints: Constraints
) -> None:
    """The noise of a token is its own: a mask over tokens that would not win changes none."""
    free = SamplingParams(temperature=1.0, seed=21, max_tokens=25)
    (without,) = generate(model, [PROMPT], free)
    seen = set(without.token_ids)
    stops = tuple(token for token in range(300, 900) if token not in seen)
    bound = SamplingParams(
        temperature=1.0,
        seed=21,
        max_tokens=25,
        stop_token_ids=stops,
        constraint=OutputConstraint(grammar=JSON_ONLY.grammar, starts_after=(2, 2)),
    )
    (within,) = generate(model, [PROMPT], bound, constraints=constraints)
    assert within.token_ids == without.token_ids
