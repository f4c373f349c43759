"""The tokens of steps with drafts are those of steps without, one by one, whoever drafts what."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.boot.build import build_model
from engine.draft_choices import DraftChoices
from engine.model.spec import ServedModel
from engine.request import Request
from engine.sampling import graph_sampler
from engine.sampling.inputs import SampledToken
from runtime.sampling import SamplingParams
from tests.engine.graphs.drafting import DraftWorker, SelfDrafting, draw_requests
from tests.engine.tiny import write_checkpoint

NUM_REQUESTS = 10
BUNDLED = Path(__file__).parents[3] / "deploy" / "models" / "tandem-python"
PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Counter:\n    def __init__(self):\n        self.",
    "for key, value in sorted(items",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), with_mtp=True)


def run(worker: DraftWorker, seed: int, *, rests: bool = False) -> list[list[SampledToken]]:
    requests = draw_requests(seed, NUM_REQUESTS, vocab_size=worker.model.config.vocab_size)
    draw = random.Random(seed)
    return worker.run(requests, lambda request: rests and draw.random() < 0.2)


def assert_same(actual: list[list[SampledToken]], expected: list[list[SampledToken]]) -> None:
    assert [[token.token_id for token in one] for one in actual] == [
        [token.token_id for token in one] for one in expected
    ]
    pairs = zip(chain.from_iterable(actual), chain.from_iterable(expected), strict=True)
    for ours, theirs in pairs:
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.top_ids == theirs.logprobs.top_ids
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("misses", [None, 0, 3])
def test_tokens_and_logprobs_are_those_without_drafts(
    model: ServedModel, num_drafts: int, ahead: bool, misses: int | None
) -> None:
    """Of layers that know nothing, that are always right, and that err now and then."""
    drafter = None if misses is None else SelfDrafting(model, misses)
    seed = 10 * num_drafts + ahead
    expected = run(DraftWorker(model, 0, ahead=False), seed)
    worker = DraftWorker(model, num_drafts, ahead, drafter=drafter)
    assert_same(run(worker, seed, rests=misses == 3), expected)
    if misses == 0:
        assert worker.num_steps < max(map(len, expected))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("misses", [None, 0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_step_may_have_any_number_of_drafts_whatever_the_one_before_had(
    model: ServedModel, seed: int, ahead: bool, misses: int | None
) -> None:
    """Also none, also behind a step that is not read; requests join and rest meanwhile."""
    expected = run(DraftWorker(model, 0, ahead=False), seed)
    draw = random.Random(100 + seed)
    worker = DraftWorker(
        model,
        DraftChoices.up_to(3, max_rows=0),
        ahead,
        drafter=None if misses is None else SelfDrafting(model, misses),
        choose=lambda: draw.randrange(4),
    )
    assert_same(run(worker, seed, rests=True), expected)
    if misses == 0:
        assert max(worker.counts) >= 3


@pytest.mark.parametrize("off", range(1, 4))
def test_the_layer_s_kv_has_no_gap_where_steps_had_no_drafts(model: ServedModel, off: int) -> None:
    """It holds of every token what it would hold with drafts in every step."""

    def kv_of(choose: Callable[[], int]) -> Tensor:
        params = SamplingParams(temperature=0.0, max_tokens=24)
        request = Request(request_id="a", prompt_token_ids=[5, 77, 12, 9], sampling=params)
        choices = DraftChoices.up_to(2, max_rows=0)
        worker = DraftWorker(model, choices, False, with_prompts=True, choose=choose)
        worker.run([request])
        pool = worker.pool
        rows = pool.layer(pool.num_layers - 1)[request.block_table].flatten(0, 1)
        return rows[: request.num_tokens - 2].clone()

    draw = random.Random(off)
    expected = kv_of(lambda: 2)
    for choose in (lambda: 0, lambda: draw.choice([0, 0, 1, 2])):
        torch.testing.assert_close(kv_of(choose), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_the_layer_s_kv_has_no_gap_where_steps_were_not_of_fixed_shape(
    model: ServedModel, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request with more bias than their tables hold, which rests now and then."""

    def kv_of(*, is_crowded: bool) -> Tensor:
        monkeypatch.setattr(graph_sampler, "MAX_EDITS", 1 if is_crowded else 320)
        params = SamplingParams(temperature=0.0, max_tokens=24)
        bias = replace(params, max_tokens=12, logit_bias={3: 4.0, 77: -5.0})
        request, other = (
            Request(request_id="a", prompt_token_ids=[5, 77, 12, 9], sampling=sampling)
            for sampling in (params, bias)
        )
        worker = DraftWorker(model, num_drafts, False, with_prompts=True)
        draw = random.Random(3)
        worker.run([request, other], lambda one: one is other and draw.random() < 0.4)
        layer = worker.pool.layer(worker.pool.num_layers - 1)
        rows = [
            layer[one.block_table].flatten(0, 1)[: one.num_tokens - 2] for one in (request, other)
        ]
        return torch.cat(rows).clone()

    torch.testing.assert_close(kv_of(is_crowded=True), kv_of(is_crowded=False), rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_draft_has_the_noise_the_penalties_and_the_bias_of_its_place(
    model: ServedModel, num_drafts: int
) -> None:
    """Who drafts by the model itself is right every time, whatever the sampling."""
    worker = DraftWorker(model, num_drafts, ahead=True, drafter=SelfDrafting(model))
    most = max(map(len, run(worker, 5)))
    # The prompt gives a token, and so does the first step, which has no drafts; each of the others
    # gives all that it can; and the last one was launched before the end was read.
    assert worker.num_steps <= 1 + -(-(most - 2) // (num_drafts + 1)) + 1


def test_steps_without_drafts_may_come_between(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request with more bias than the tables of fixed shape hold, which rests now and then."""
    monkeypatch.setattr(graph_sampler, "MAX_EDITS", 1)

    def outputs(worker: DraftWorker) -> list[list[SampledToken]]:
        requests = draw_requests(8, NUM_REQUESTS, vocab_size=model.config.vocab_size)
        for place, request in enumerate(requests):
            bias = {} if place else {3: 4.0, 77: -5.0}
            request.sampling = replace(
                request.sampling, logit_bias=bias, min_tokens=0, max_tokens=12, num_logprobs=-1
            )
        draw = random.Random(1)
        return worker.run(requests, lambda one: one is requests[0] and draw.random() < 0.5)

    worker = DraftWorker(model, 2, ahead=False, drafter=SelfDrafting(model, misses=3))
    assert_same(outputs(worker), outputs(DraftWorker(model, 0, ahead=False)))


def test_a_first_draft_of_whoever_ran_the_prompt_is_verified_at_once(model: ServedModel) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)

    def make() -> Request:
        return Request(request_id="a", prompt_token_ids=[5, 77, 12, 9], sampling=params)

    (whole,) = DraftWorker(model, 0, ahead=False).run([make()])
    tokens, counts = [token.token_id for token in whole], []
    for guess in (0, 1):
        worker = DraftWorker(model, 1, ahead=False)
        request = make()
        request.draft_token_ids = (tokens[1] if guess else (tokens[1] + 1) % 128,)
        assert [token.token_id for token in worker.run([request])[0]] == tokens
        counts.append(worker.counts[1])  # behind the prompt's
    assert counts == [1, 2]


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_a_trained_layer_s_drafts_are_often_right_and_the_text_is_the_same(
    num_drafts: int,
) -> None:
    """On source code, greedily and sampled; the layer has run over the prompts."""
    model = build_model(BUNDLED, with_mtp=True)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))

    def requests() -> list[Request]:
        return [
            Request(
                request_id=f"{text}{temperature}",
                prompt_token_ids=tokenizer.encode(text).ids,
                sampling=SamplingParams(temperature=temperature, top_p=0.95, seed=7, max_tokens=24),
            )
            for text in PROMPTS
            for temperature in (0.0, 0.8)
        ]

    expected = DraftWorker(model, 0, False, block_size=16, max_model_len=64).run(requests())
    worker = DraftWorker(
        model, num_drafts, True, block_size=16, max_model_len=64, with_prompts=True
    )
    assert_same(worker.run(requests()), expected)
    counts = worker.counts[len(expected) :]
    assert sum(counts) > 1.3 * len(counts)
