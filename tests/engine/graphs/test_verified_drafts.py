"""What a step says of its drafts: how many it verified of a request, how many it had room for."""

import pytest

from engine.boot.build import build_model
from engine.model.spec import ServedModel
from engine.request import Request
from runtime.sampling import SamplingParams
from tests.engine.graphs.drafting import DraftWorker, SelfDrafting
from tests.engine.tiny import write_checkpoint

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), with_mtp=True)


def make_request() -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    return Request(request_id="a", prompt_token_ids=[5, 77, 12, 9], sampling=params)


def numbers(worker: DraftWorker) -> list[tuple[int, int, int]]:
    """Drafts that were right, those that were verified, and K, by step behind the prompt's."""
    return [
        (len(result.more), result.num_verified, result.max_drafts) for result in worker.results[1:]
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_verifies_what_the_one_before_it_drafted_as_far_as_tokens_are_wanted(
    model: ServedModel, ahead: bool
) -> None:
    """The first step has none; of the last ones those beyond `max_tokens` have no place."""
    worker = DraftWorker(model, 2, ahead, drafter=SelfDrafting(model))
    worker.run([make_request()])
    # One of the prompt, 1, 3, 3 and 3 of steps; the last step has room for the KV of one token.
    assert numbers(worker) == [(0, 0, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2), (0, 0, 2)]


def test_drafts_that_are_wrong_were_verified_all_the_same(model: ServedModel) -> None:
    worker = DraftWorker(model, 1, False, drafter=SelfDrafting(model, misses=2))
    worker.run([make_request()])
    found = numbers(worker)
    assert {verified for _, verified, _ in found[1:-1]} == {1}
    assert {right for right, _, _ in found[1:-1]} == {0, 1}
    assert sum(1 + right for right, _, _ in found) == MAX_TOKENS - 1


def test_steps_without_drafts_verify_none(model: ServedModel) -> None:
    worker = DraftWorker(model, 0, False)
    worker.run([make_request()])
    assert numbers(worker) == [(0, 0, 0)] * (MAX_TOKENS - 1)
