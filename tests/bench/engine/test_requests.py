"""Requests never run out, differ from one another, and keep the lengths that were drawn."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.requests import (
    PromptBatches,
    RunningRequests,
    SamplingChoice,
    draw_contexts,
)
from bench.engine.schemas import SchemaOutputs
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.sampling.inputs import SampledToken
from grammar.matcher import num_mask_words

BLOCK = 8
VOCAB = 512
QUOTE, COMMA, BRACE = 17, 27, 108  # in the vocabulary of the bundled model
CHOICE = SamplingChoice(temperature=0.8, top_p=0.95, vocab_size=VOCAB)


def make(
    contexts: Sequence[int], *, output_len: int = 5, seed: int = 1, choice: SamplingChoice = CHOICE
) -> RunningRequests:
    return RunningRequests(
        contexts,
        output_len=output_len,
        block_size=BLOCK,
        sampling=choice,
        generator=random.Random(seed),
    )


def answer(scheduled: list[ScheduledRequest]) -> list[StepResult]:
    return [StepResult(request=item.request, sampled=SampledToken(3)) for item in scheduled]


@given(st.integers(2, 5000), st.integers(0, 5000), st.integers(0, 2**32))
def test_contexts_are_drawn_uniformly_from_their_range(least: int, width: int, seed: int) -> None:
    drawn = draw_contexts(least, least + width, 400, random.Random(seed))
    assert all(least <= context <= least + width for context in drawn)
    spread = ((width + 1) ** 2 / 12 / 400) ** 0.5
    assert abs(sum(drawn) / 400 - (least + width / 2)) < 7 * spread + 1e-9
    if width > 1000:
        assert len(set(drawn)) > 200, "no two are tied to each other"


@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=6),
    st.integers(1, 12),
    st.integers(0, 1),
    st.integers(0, 2**32),
)
def test_every_step_stays_within_the_lengths_and_blocks_of_its_places(
    contexts: list[int], output_len: int, max_ahead: int, seed: int
) -> None:
    requests = make(contexts, output_len=output_len, seed=seed)
    unread: list[list[ScheduledRequest]] = []
    ends: list[list[int]] = []
    for _ in range(3 * output_len + 2):
        scheduled = requests.schedule()
        assert all(item.samples and item.num_scheduled_tokens == 1 for item in scheduled)
        used = Counter(block for item in scheduled for block in item.request.block_table)
        assert max(used.values()) == 1
        assert set(used) <= set(range(1, requests.num_blocks))
        for item, context in zip(scheduled, contexts, strict=True):
            assert context <= item.end < context + output_len
            assert len(item.request.block_table) * BLOCK >= item.end
        ends.append([item.end - context for item, context in zip(scheduled, contexts, strict=True)])
        unread.append(scheduled)
        while len(unread) > max_ahead:
            requests.take(answer(unread.pop(0)))
    for ages in zip(*ends[:output_len], strict=True):
        assert sorted(ages) == list(range(output_len)), "of each age once in as many steps"


def test_who_has_ended_is_followed_by_another_with_other_tokens_and_seed() -> None:
    requests = make([20, 30], output_len=2)
    seen = []
    for _ in range(6):
        scheduled = requests.schedule()
        seen += [item.request for item in scheduled]
        requests.take(answer(scheduled))
    unlike = {id(request): request for request in seen}.values()
    assert len(unlike) >= 2 + 4
    assert len({request.sampling.seed for request in unlike}) == len(unlike)
    assert len({tuple(request.prompt_token_ids) for request in unlike}) == len(unlike)
    assert len({request.request_id for request in unlike}) == len(unlike)


def test_greedy_requests_say_different_tokens() -> None:
    greedy = SamplingChoice(temperature=0.0, top_p=1.0, vocab_size=VOCAB)
    requests = make([9] * 20, choice=greedy)
    biases = [item.request.sampling.logit_bias for item in requests.schedule()]
    assert all(len(bias) == 1 and min(bias.values()) >= 1e4 for bias in biases)
    assert len({token for bias in biases for token in bias}) > 15
    drawn = [item.request.sampling for item in make([9] * 3).schedule()]
    assert all((each.temperature, each.top_p) == (0.8, 0.95) for each in drawn)
    assert not any(each.logit_bias for each in drawn)


def test_requests_in_the_middle_of_what_their_schemas_describe() -> None:
    schemas = SchemaOutputs(
        "no folder", VOCAB, num_places=3, num_fields=2, generator=random.Random(1)
    )
    requests = RunningRequests(
        [20, 30, 40],
        output_len=40,
        block_size=BLOCK,
        sampling=CHOICE,
        generator=random.Random(2),
        schemas=schemas,
    )
    words = np.empty(num_mask_words(VOCAB), dtype=np.int32)
    seen: dict[int, Request] = {}
    for _ in range(100):
        results = []
        for item in requests.schedule():
            request = seen.setdefault(id(item.request), item.request)
            assert request.is_ready
            assert 20 <= item.end < 40 + 40
            matcher = request.matcher
            assert matcher is not None
            matcher.follow(request.output_token_ids)
            assert matcher.is_binding, "whoever is over is followed by another"
            matcher.fill(words)
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=VOCAB)
            ending = next((token_id for token_id in (QUOTE, COMMA, BRACE) if bits[token_id]), None)
            token_id = int(np.flatnonzero(bits)[0]) if ending is None else ending
            matcher.take(len(request.output_token_ids), token_id)
            results.append(StepResult(request=request, sampled=SampledToken(token_id)))
        requests.take(results)
    requests.close()
    constraints = [request.sampling.constraint for request in seen.values()]
    assert len({each.grammar for each in constraints if each is not None}) == 3
    told = requests.describe_schemas()
    assert told is not None
    assert (told["fields"], told["bound_per_step"], told["failed"]) == (2, 3.0, 0)
    assert told["ended"] >= 1


def test_a_request_whose_schema_cannot_be_followed_is_told_of_and_followed() -> None:
    schemas = SchemaOutputs(
        "no folder", VOCAB, num_places=1, num_fields=2, generator=random.Random(1)
    )
    requests = RunningRequests(
        [20],
        output_len=9,
        block_size=BLOCK,
        sampling=CHOICE,
        generator=random.Random(2),
        schemas=schemas,
    )
    (item,) = requests.schedule()
    requests.take([StepResult(request=item.request, sampled=None, is_failed=True)])
    assert item.request.matcher is not None
    item.request.matcher.follow(item.request.output_token_ids)
    (after,) = requests.schedule()
    requests.close()
    assert after.request is not item.request
    told = requests.describe_schemas()
    assert told is not None
    assert told["failed"] == 1


def test_a_seed_gives_the_same_requests_again() -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [item.request.prompt_token_ids for item in make([12, 15], seed=seed).schedule()]

    assert tokens(4) == tokens(4)
    assert tokens(4) != tokens(5)


def test_a_rank_without_requests_has_a_pool_and_no_step() -> None:
    requests = make([])
    assert len(requests) == 0
    assert requests.schedule() == []
    assert requests.num_blocks == 2


def test_looking_at_the_next_step_takes_nothing() -> None:
    requests = make([12, 15])
    looked = [(item.request, item.end) for item in requests.peek()]
    assert [(item.request, item.end) for item in requests.schedule()] == looked


def test_batches_follow_each_other_in_two_sets_of_blocks() -> None:
    batches = PromptBatches(20, 3, block_size=BLOCK, sampling=CHOICE, generator=random.Random(1))
    assert len(batches) == 3
    first, second, third = (batches.schedule() for _ in range(3))
    tables = [{b for item in batch for b in item.request.block_table} for batch in (first, second)]
    assert not tables[0] & tables[1]
    assert tables[0] | tables[1] == set(range(1, batches.num_blocks))
    assert tables[0] == {b for item in third for b in item.request.block_table}
    prompts = [tuple(item.request.prompt_token_ids) for item in (*first, *second, *third)]
    assert len(set(prompts)) == 9
    assert {len(prompt) for prompt in prompts} == {20}
    assert all(item.samples for item in first)
    assert len(batches.schedule(1)) == 1


def test_prompts_behind_a_prefix_run_only_what_follows_it() -> None:
    batches = PromptBatches(
        5, 2, cached_len=3 * BLOCK, block_size=BLOCK, sampling=CHOICE, generator=random.Random(1)
    )
    for item in batches.schedule():
        assert (item.start, item.end) == (3 * BLOCK, 3 * BLOCK + 5)
        assert item.samples
        assert len(item.request.block_table) == 3 + -(-5 // BLOCK)


def test_a_batch_draws_only_the_tokens_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = PromptBatches(
        5, 2, cached_len=3 * BLOCK, block_size=BLOCK, sampling=CHOICE, generator=random.Random(1)
    )
    draw, counts = batches._tokens.draw, list[int]()

    def count_and_draw(count: int) -> list[int]:
        counts.append(count)
        return draw(count)

    monkeypatch.setattr(batches._tokens, "draw", count_and_draw)
    suffixes = [item.request.prompt_token_ids[3 * BLOCK :] for item in batches.schedule()]
    assert counts == [5, 5]
    assert suffixes[0] != suffixes[1]


@pytest.mark.parametrize("num_prompts", [1, 4])
def test_ranks_that_share_heads_draw_the_same(num_prompts: int) -> None:
    def draw() -> list[list[int]]:
        batches = PromptBatches(
            9, num_prompts, block_size=BLOCK, sampling=CHOICE, generator=random.Random("7 of 0")
        )
        return [item.request.prompt_token_ids for item in batches.schedule()]

    assert draw() == draw()
