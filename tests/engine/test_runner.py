"""The runner on a small fake model: chunks, company and shared prefixes change nothing."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine.runner
from engine.attention.kv_spec import KVSpec
from engine.batch import build_forward_batch
from engine.memory.kv_pool import KVPool
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.fake_model import LATENT_DIM, FakeModel

BLOCK_SIZE = 4
VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


def make_runner(num_blocks: int = 64) -> ModelRunner:
    model = FakeModel()
    return ModelRunner(
        model, KVPool(num_blocks, 2, BLOCK_SIZE, KVSpec.shared(LATENT_DIM)), Sampler(VOCAB)
    )


def make_request(
    prompt: list[int], first_block: int = 1, sampling: SamplingParams = GREEDY
) -> Request:
    num_blocks = num_blocks_for(len(prompt) + 8, BLOCK_SIZE)
    return Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=sampling,
        block_table=list(range(first_block, first_block + num_blocks)),
    )


def run_prompt(runner: ModelRunner, request: Request, chunk: int) -> list[float]:
    """Prefill in chunks, append the sampled token, return the prompt logprobs."""
    logprobs: list[float] = []
    while request.num_computed_tokens < request.num_prompt_tokens:
        count = min(chunk, request.num_prompt_tokens - request.num_computed_tokens)
        result = runner.execute([ScheduledRequest(request, count)])[0]
        request.num_computed_tokens += count
        logprobs += [entry.logprob for entry in result.prompt_logprobs]
        assert (result.sampled is None) == (request.num_uncomputed_tokens > 0)
    assert result.sampled is not None
    request.output_token_ids.append(result.sampled.token_id)
    return logprobs


def decode(runner: ModelRunner, requests: list[Request], steps: int) -> None:
    for _ in range(steps):
        results = runner.execute([ScheduledRequest(request, 1) for request in requests])
        for request, result in zip(requests, results, strict=True):
            assert result.request is request
            assert result.sampled is not None
            request.num_computed_tokens += 1
            request.output_token_ids.append(result.sampled.token_id)


prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)


@given(prompts, st.integers(1, 14))
@settings(max_examples=40, deadline=None)
def test_chunks_give_the_tokens_of_the_whole_prompt(prompt: list[int], chunk: int) -> None:
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=0)
    whole, chunked = make_request(prompt, 1, sampling), make_request(prompt, 20, sampling)
    runner = make_runner()
    expected = run_prompt(runner, whole, len(prompt))
    actual = run_prompt(runner, chunked, chunk)
    decode(runner, [whole], 3)
    decode(runner, [chunked], 3)
    assert chunked.output_token_ids == whole.output_token_ids
    assert len(expected) == len(prompt) - 1
    assert actual == pytest.approx(expected, abs=1e-5)


@given(st.lists(prompts, min_size=2, max_size=4))
@settings(max_examples=25, deadline=None)
def test_company_does_not_change_tokens(several: list[list[int]]) -> None:
    runner = make_runner()
    sampling = [SamplingParams(temperature=float(i % 2), seed=i) for i in range(len(several))]
    together = [make_request(prompt, 1 + 8 * i, sampling[i]) for i, prompt in enumerate(several)]
    scheduled = [ScheduledRequest(request, request.num_prompt_tokens) for request in together]
    for request, result in zip(together, runner.execute(scheduled), strict=True):
        assert result.sampled is not None
        request.num_computed_tokens = request.num_prompt_tokens
        request.output_token_ids.append(result.sampled.token_id)
    decode(runner, together, 3)
    for i, prompt in enumerate(several):
        alone = make_request(prompt, 40, sampling[i])
        run_prompt(runner, alone, len(prompt))
        decode(runner, [alone], 3)
        assert alone.output_token_ids == together[i].output_token_ids


def test_a_shared_prefix_gives_the_same_tokens() -> None:
    runner = make_runner()
    prompt = list(range(11))
    first, second = make_request(prompt, 1), make_request(prompt, 20)
    run_prompt(runner, first, 11)
    second.block_table[:2] = first.block_table[:2]
    second.num_computed_tokens = second.num_cached_tokens = 2 * BLOCK_SIZE
    run_prompt(runner, second, 11)
    decode(runner, [first, second], 3)
    assert second.output_token_ids == first.output_token_ids


def test_mixed_steps_sample_only_at_the_end_of_known_tokens() -> None:
    runner = make_runner()
    decoding, inside = make_request([1, 2, 3], 1), make_request(list(range(9)), 10)
    run_prompt(runner, decoding, 3)
    results = runner.execute([ScheduledRequest(inside, 4), ScheduledRequest(decoding, 1)])
    assert results[0].sampled is None
    assert results[0].prompt_logprobs == []
    assert results[1].sampled is not None


def test_requests_are_not_changed() -> None:
    runner = make_runner()
    request = make_request([1, 2, 3])
    runner.execute([ScheduledRequest(request, 3)])
    assert request.num_computed_tokens == 0
    assert request.output_token_ids == []


def test_logits_exist_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=1, num_logprobs=0)
    prompt = list(range(10))
    expected_runner, runner = make_runner(), make_runner()
    plan = [
        ScheduledRequest(make_request([5, 6], 10), 2),
        ScheduledRequest(make_request(prompt, 1, sampling), 10),
        ScheduledRequest(make_request([7], 20), 1),
    ]
    expected = expected_runner.execute(plan)
    monkeypatch.setattr(engine.runner, "MAX_LOGITS_ROWS", 4)
    results = runner.execute(plan)
    assert isinstance(runner.model, FakeModel)
    assert runner.model.logits_calls == [4, 4, 4]
    assert [r.sampled and r.sampled.token_id for r in results] == [
        r.sampled and r.sampled.token_id for r in expected
    ]
    assert len(results[1].prompt_logprobs) == 9
    for actual, whole in zip(results[1].prompt_logprobs, expected[1].prompt_logprobs, strict=True):
        assert actual.logprob == pytest.approx(whole.logprob, abs=1e-5)
        assert actual.top_ids == whole.top_ids


def test_a_rank_that_follows_computes_no_logits() -> None:
    runner = make_runner()
    plan = [ScheduledRequest(make_request([5, 6, 7], 10), 3)]
    runner.forward_only(build_forward_batch(plan, BLOCK_SIZE))
    assert isinstance(runner.model, FakeModel)
    assert len(runner.model.batches) == 1
    assert runner.model.logits_calls == []
    assert runner.kv_pool.data[10].any(), "its KV is written"


def test_a_request_without_finite_logits_fails_alone() -> None:
    runner = make_runner()
    bad, good, inside = make_request([3, 4], 1), make_request([5, 6], 10), make_request([7, 8], 20)
    expected = runner.execute([ScheduledRequest(good, 2)])[0]
    assert isinstance(runner.model, FakeModel)
    runner.model.embedding[3] = float("nan")
    plan = [ScheduledRequest(bad, 2), ScheduledRequest(inside, 1), ScheduledRequest(good, 2)]
    results = runner.execute(plan)
    assert [result.is_failed for result in results] == [True, False, False]
    assert [result.sampled is None for result in results] == [True, True, False]
    assert results[2].sampled == expected.sampled
    assert [r.is_failed for r in runner.execute(plan[:1])] == [True]


def test_layers_are_reported_in_order() -> None:
    done: list[int] = []
    make_runner().execute([ScheduledRequest(make_request([1]), 1)], on_layer_done=done.append)
    assert done == [0, 1]


def test_others_get_their_turn_between_layers_and_slices_of_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner()
    monkeypatch.setattr(engine.runner, "MAX_LOGITS_ROWS", 4)
    sampling = dataclasses.replace(GREEDY, num_prompt_logprobs=1)
    seen: list[int] = []
    assert isinstance(runner.model, FakeModel)
    model = runner.model
    plan = [ScheduledRequest(make_request(list(range(10)), 1, sampling), 10)]
    runner.launch(plan, meanwhile=lambda: seen.append(len(model.logits_calls)))
    assert seen == [0, 0, 1, 2, 3]


def test_the_dummy_step_touches_block_zero_alone() -> None:
    runner = make_runner()
    runner.run_dummy()
    assert not runner.kv_pool.data[1:].any()
    assert isinstance(runner.model, FakeModel)
    assert runner.model.logits_calls == []


def test_a_step_is_launched_on_tokens_that_nobody_has_read() -> None:
    penalised = SamplingParams(
        temperature=0.8, seed=5, repetition_penalty=1.7, frequency_penalty=0.6, min_tokens=4,
        stop_token_ids=tuple(range(VOCAB // 2)),
    )  # fmt: skip
    samplings = [GREEDY, SamplingParams(seed=3), penalised]
    in_order = [make_request([1, 2, 3 + i], 1 + 8 * i, s) for i, s in enumerate(samplings)]
    ahead = [make_request([1, 2, 3 + i], 1 + 8 * i, s) for i, s in enumerate(samplings)]
    runner = make_runner()
    for request in in_order:
        run_prompt(runner, request, 3)
    decode(runner, in_order, 6)

    runner = make_runner()
    for request in ahead:
        run_prompt(runner, request, 3)
    pending = None
    for _ in range(6):
        # Rows change places from step to step: a token follows its request.
        scheduled = [ScheduledRequest(request, 1) for request in reversed(ahead)]
        launched = runner.launch(scheduled, after=pending)
        for request in ahead:
            request.num_launched_tokens += 1
        if pending is not None:
            assert [item.num_unread for item in scheduled] == [1, 1, 1]
            take_over(pending.collect())
        ahead.reverse()
        pending = launched
    assert pending is not None
    take_over(pending.collect())
    expected = {request.block_table[0]: request.output_token_ids for request in in_order}
    assert {request.block_table[0]: request.output_token_ids for request in ahead} == expected


def take_over(results: list[StepResult]) -> None:
    for result in results:
        assert result.sampled is not None
        result.request.num_computed_tokens += 1
        result.request.num_launched_tokens -= 1
        result.request.output_token_ids.append(result.sampled.token_id)


def test_results_are_of_the_requests_as_they_were_launched() -> None:
    runner = make_runner()
    request = make_request([1, 2, 3, 4])
    expected = runner.execute([ScheduledRequest(request, 4)])
    pending = runner.launch([ScheduledRequest(request, 4)])
    assert pending.is_done
    request.num_computed_tokens, request.block_table = 4, []
    request.output_token_ids.append(9)
    assert pending.collect() == expected
