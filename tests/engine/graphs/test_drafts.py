"""The tokens of steps with drafts are those of steps without, one by one, whoever drafts what."""

import random
from pathlib import Path

import pytest

from engine.boot.build import build_model
from engine.graphs.draft_rows import NO_DRAFT
from engine.model.spec import ServedModel
from engine.request import Request
from engine.sampling.inputs import SampledToken
from tests.engine.graphs.drafting import DraftWorker, draw_requests
from tests.engine.tiny import write_checkpoint

SEEDS = range(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), with_mtp=True)


def outputs(
    model: ServedModel, seed: int, num_drafts: int, *, ahead: bool, rests: bool = False
) -> list[list[SampledToken]]:
    worker = DraftWorker(model, num_drafts, ahead)
    requests = draw_requests(seed, 10, vocab_size=model.config.vocab_size)
    draw = random.Random(seed)
    return worker.run(requests, lambda request: rests and draw.random() < 0.2)


def assert_same(actual: list[list[SampledToken]], expected: list[list[SampledToken]]) -> None:
    assert [[token.token_id for token in one] for one in actual] == [
        [token.token_id for token in one] for one in expected
    ]
    for ours, theirs in zip(sum(actual, []), sum(expected, []), strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.top_ids == theirs.logprobs.top_ids
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-5)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_and_logprobs_are_those_without_drafts(
    model: ServedModel, num_drafts: int, ahead: bool
) -> None:
    for seed in SEEDS:
        expected = outputs(model, seed, 0, ahead=False)
        assert_same(outputs(model, seed, num_drafts, ahead=ahead), expected)
        assert_same(outputs(model, seed, num_drafts, ahead=ahead, rests=True), expected)
