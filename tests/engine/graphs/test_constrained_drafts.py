"""Requests with a constraint have drafts: the same text, and the same end, in fewer steps."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from engine.boot.build import build_model
from engine.model.spec import ServedModel
from engine.request import Request
from grammar import guard
from grammar.constraints import Constraints
from grammar.matcher import Int32Array, Matcher, num_mask_words
from runtime.sampling import FinishReason, OutputConstraint, SamplingParams
from tests.engine.graphs.drafting import DraftWorker, SelfDrafting, draw_requests
from tests.engine.graphs.test_drafts import assert_same, model
from tests.engine.graphs.test_masked_steps import ChainGrammar
from tests.grammar.schemas import EOS, MODEL_DIR, VOCAB, grammar_of, random_schema

__all__ = ["model"]

AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["at-once", "ahead"])
DRAFTS = pytest.mark.parametrize("num_drafts", [1, 2, 3])


class Looser(ChainGrammar):
    """Rules out a quarter of the tokens, and ends after so many, or after none."""

    def __init__(self, length: int = 1 << 30) -> None:
        super().__init__()
        self.length = length

    def may_follow(self, token_id: int) -> bool:
        return not self.is_complete and (token_id * 5 + self.last) % 4 != 1

    def fill(self, words: Int32Array) -> None:
        bits = (np.arange(32 * len(words)) * 5 + self.last) % 4 != 1
        words[:] = 0 if self.is_complete else np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def is_complete(self) -> bool:
        return len(self.taken) > self.length


def bind(request: Request, grammar: ChainGrammar | None, vocab_size: int, **fields: object) -> None:
    constraint = OutputConstraint(grammar="" if grammar is None else "own", **fields)  # type: ignore[arg-type]
    request.sampling = replace(request.sampling, constraint=constraint, stop_token_ids=())
    request.matcher = Matcher(constraint, grammar, stop_token_ids=(), vocab_size=vocab_size)


def drawn(model: ServedModel, seed: int) -> list[Request]:
    """Six requests, of which every second is free; one of the others ends, one is told to."""
    vocab_size = model.config.vocab_size
    requests = draw_requests(seed, 6, vocab_size=vocab_size)
    for request in requests:
        request.sampling = replace(request.sampling, max_tokens=14, stop_token_ids=())
    bind(requests[0], Looser(), vocab_size)
    bind(requests[2], Looser(length=7), vocab_size)
    bind(requests[4], None, vocab_size, starts_after=(3, 9), max_tokens_before=5)
    return requests


@DRAFTS
@AHEAD
@pytest.mark.parametrize("misses", [0, 3])
def test_text_and_ends_are_those_without_drafts(
    model: ServedModel, num_drafts: int, ahead: bool, misses: int
) -> None:
    """Also where some rest now and then, and the host loses sight of their drafts."""
    seed = 20 + num_drafts
    plain, expected = drawn(model, seed), DraftWorker(model, 0, ahead=False)
    texts = [list(text) for text in expected.run(plain)]
    worker = DraftWorker(model, num_drafts, ahead, drafter=SelfDrafting(model, misses))
    requests, draw = drawn(model, seed), random.Random(seed)
    rests = (lambda request: draw.random() < 0.2) if misses else (lambda request: False)
    assert_same(worker.run(requests, rests), texts)
    assert [one.finish_reason(48) for one in requests] == [one.finish_reason(48) for one in plain]
    assert requests[2].finish_reason(48) is FinishReason.COMPLETE
    assert requests[4].output_token_ids[5:7] == [3, 9], "the budget of thoughts ends in its marker"


@AHEAD
def test_a_bound_request_gets_several_tokens_a_step(model: ServedModel, ahead: bool) -> None:
    requests = drawn(model, 4)[:1]
    requests[0].sampling = replace(requests[0].sampling, temperature=0.0, repetition_penalty=1.0)
    worker = DraftWorker(model, 2, ahead, drafter=SelfDrafting(model))
    worker.run(requests)
    assert max(worker.counts) > 1
    assert worker.num_steps < len(requests[0].output_token_ids)


def test_a_matcher_goes_back_to_where_it_was() -> None:
    """Through the marker into the grammar, to its end and beyond what may come."""
    constraint = OutputConstraint(grammar="own", starts_after=(7, 8))
    draw = random.Random(3)
    for _ in range(200):
        matcher = Matcher(constraint, Looser(length=3), stop_token_ids=(5,), vocab_size=64)
        matcher.follow([draw.choice([7, 8, 9]) for _ in range(draw.randrange(4))])
        before, mark = mask_of(matcher), matcher.mark()
        for _ in range(draw.randrange(1, 7)):
            matcher.take(matcher.num_taken, draw.choice([7, 8, 5, draw.randrange(64)]))
        matcher.go_back(mark)
        assert not matcher.is_over
        assert matcher.error is None
        assert mask_of(matcher) == before


def mask_of(matcher: Matcher) -> tuple[bool, int, list[int]]:
    words = np.zeros(num_mask_words(64), dtype=np.int32)
    if matcher.is_binding:
        matcher.fill(words)
    return matcher.is_binding, matcher.num_taken, words.tolist()


@pytest.mark.parametrize(
    "num_schemas", [6, pytest.param(40, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_random_schemas_of_a_trained_model(
    num_schemas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer drafts without masks: drafts that the schema rules out are not verified.

    Two drafts have masks of other processes, which this worker cannot do without.
    """
    monkeypatch.setattr(guard, "WAIT_S", 60.0)
    trained = build_model(MODEL_DIR, with_mtp=True)
    constraints, draw = Constraints(MODEL_DIR, VOCAB), random.Random(num_schemas)
    schemas = [grammar_of(random_schema(draw)) for _ in range(num_schemas)]

    def requests(grammars: list[str], *, is_guarded: bool = False) -> list[Request]:
        made = []
        for place, grammar in enumerate(grammars):
            params = SamplingParams(
                temperature=0.7 * (place % 2),
                seed=place,
                max_tokens=40,
                stop_token_ids=(EOS,),
                constraint=OutputConstraint(grammar=grammar, is_guarded=is_guarded),
            )
            matcher = constraints.begin(params).result()
            prompt = [300 + (place * 91 + index * 7) % 3000 for index in range(9)]
            made.append(
                Request(
                    request_id=str(place),
                    prompt_token_ids=prompt,
                    sampling=params,
                    matcher=matcher,
                )
            )
        return made

    plain = DraftWorker(trained, 0, False, block_size=16, max_model_len=64)
    counts = []
    for start in range(0, num_schemas, 6):
        some = schemas[start : start + 6]
        expected = [list(text) for text in plain.run(requests(some))]
        for num_drafts in (1, 2):
            worker = DraftWorker(
                trained, num_drafts, True, block_size=16, max_model_len=64, with_prompts=True
            )
            assert_same(worker.run(requests(some, is_guarded=num_drafts == 2)), expected)
            counts += worker.counts[len(some) :]
    assert sum(counts) > 1.05 * len(counts)
    constraints.close()
