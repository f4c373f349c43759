"""A step is launched while the one before it runs, and what happens meanwhile is not lost."""

from __future__ import annotations

import dataclasses
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.kv_spec import KVSpec
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import (
    AddRequest,
    Event,
    FirstTokenSampled,
    LoopEnded,
    RankClosed,
    RequestFailed,
    RequestFinished,
    StopLoop,
)
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.errors import DeadlineExceededError, ErrorCode, PeerLostError
from runtime.sampling import SamplingParams
from tests.engine.fake_model import LATENT_DIM, FakeModel
from tests.prefill.fakes import BLOCK_SIZE, FIRST_TOKEN, FakeTicketSender, grant_all, make_item
from tests.prefill.test_loop import Bench
from worker.lifecycle import PrefillStatus


@pytest.mark.parametrize(
    ("max_ahead", "log"),
    [
        (0, ["launch 0", "collect 0", "launch 1", "collect 1", "launch 2", "collect 2"]),
        (1, ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]),
    ],
)
def test_the_next_step_is_launched_before_the_last_is_collected(
    max_ahead: int, log: list[str]
) -> None:
    bench = Bench(max_ahead=max_ahead)
    bench.add(make_item(1, 20))
    bench.turn(steps=4)
    assert bench.runner.log == log
    spans = [(0, 8), (8, 16), (16, 20)]
    assert bench.runner.steps == [[("request-1", start, end)] for start, end in spans]
    assert len(bench.of_type(FirstTokenSampled)) == 1
    bench.drain()
    bench.assert_over()


class EndsInLaunch:
    """Step `step` ends on the device when layer 1 of the next one is launched."""

    def __init__(self, bench: Bench, step: int = 0) -> None:
        self._bench, self._step = bench, step
        self.running = set(range(10))
        self.num_tokens: list[int] = []  # that have left, at each layer of the next launch
        bench.runner.running, bench.runner.at_layer = self.running, self._at_layer

    def _at_layer(self, step: int, layer: int) -> None:
        if step == self._step + 1:
            self.num_tokens.append(len(self._bench.of_type(FirstTokenSampled)))
            if layer == 1:
                self.running.discard(self._step)


def test_a_first_token_leaves_in_the_middle_of_the_next_launch() -> None:
    bench = Bench(max_ahead=1)
    device = EndsInLaunch(bench)
    bench.add(make_item(1, 8))
    bench.add(make_item(2, 20))
    bench.turn(steps=2)
    assert device.num_tokens == [0, 0, 1]
    assert bench.runner.log == ["launch 0", "launch 1", "collect 0"], "nobody waited"
    assert 1 in device.running
    device.running.clear()
    bench.turn(steps=4)
    assert len(bench.of_type(FirstTokenSampled)) == 2
    bench.drain()
    bench.assert_over(2)


def test_what_a_step_broke_ends_in_the_middle_of_the_next_launch() -> None:
    bench = Bench(max_ahead=1)
    device = EndsInLaunch(bench)
    broken, other = bench.add(make_item(1, 4)), bench.add(make_item(2, 20))
    bench.runner.broken_requests = {broken.request_id}
    bench.turn(steps=2)
    assert bench.runner.steps[0][1][0] == other.request_id, "it is in both steps"
    assert [event.nonce for event in bench.events if isinstance(event, RequestFailed)] == [1]
    assert bench.sender.open_tickets == {1: "abandoned", 2: "open"}
    assert other.request.num_computed_tokens == 4
    device.running.clear()
    bench.turn(steps=4)
    assert len(bench.of_type(FirstTokenSampled)) == 1
    bench.drain()
    bench.assert_over(2)


def test_a_step_that_ends_behind_the_next_launch_is_taken_over_at_once() -> None:
    bench = Bench(max_ahead=1)
    bench.runner.running = {0, 1, 2}
    bench.add(make_item(1, 8))
    bench.add(make_item(2, 16))
    bench.turn(steps=3)
    assert bench.runner.log == [
        *("launch 0", "launch 1", "wait 0", "collect 0"),
        *("launch 2", "wait 1", "collect 1"),
    ]
    assert len(bench.of_type(FirstTokenSampled)) == 1


def test_a_request_is_not_scheduled_again_after_its_last_chunk() -> None:
    bench = Bench(max_ahead=1)
    first = bench.add(make_item(1, 8))
    bench.add(make_item(2, 8))
    bench.turn(steps=1)
    assert first.status is PrefillStatus.RUNNING  # its token is not known
    bench.turn(steps=1)
    assert bench.runner.steps == [[("request-1", 0, 8)], [("request-2", 0, 8)]]
    assert [event.nonce for event in bench.events if isinstance(event, FirstTokenSampled)] == [1]
    bench.turn(steps=3)
    bench.drain()
    bench.assert_over(2)


def test_a_request_whose_last_chunk_runs_takes_no_place_in_the_next_step() -> None:
    bench = Bench(max_num_batched_tokens=8, max_ahead=1)
    for nonce in range(1, 9):
        bench.add(make_item(nonce, 2))
    bench.turn(steps=2)
    assert [len(step) for step in bench.runner.steps] == [4, 4]


def test_cancelled_in_flight_it_keeps_its_blocks_until_the_step_is_over() -> None:
    bench = Bench(max_ahead=1)
    item = bench.add(make_item(1, 20))
    bench.turn(steps=2)
    assert bench.runner.log == ["launch 0", "launch 1", "collect 0"]
    bench.cancel(item)
    bench.drain()  # every rank has closed the ticket
    assert bench.of_type(RequestFinished) == []
    assert len(item.request.block_table) == 5
    bench.turn()
    assert bench.runner.log[3:] == ["collect 1"]
    bench.assert_over()


def test_cancelled_after_its_last_chunk_was_launched_it_has_no_first_token() -> None:
    bench = Bench(max_ahead=1)
    item = bench.add(make_item(1, 8))
    bench.turn()
    bench.cancel(item)
    bench.turn()
    assert bench.of_type(FirstTokenSampled) == []
    assert len(bench.of_type(RequestFailed)) == 1
    assert 1 not in bench.sender.records
    bench.drain()
    bench.assert_over()


def test_late_in_flight_it_is_answered_with_its_deadline() -> None:
    bench = Bench(max_ahead=1)
    bench.add(make_item(1, 8, deadline=1010.0))
    bench.turn()
    bench.clock.now = 1010.0
    bench.turn(steps=2)
    (failure,) = bench.of_type(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert isinstance(failure.error, DeadlineExceededError)
    assert bench.of_type(FirstTokenSampled) == []
    bench.drain()
    bench.assert_over()


def test_a_sender_that_fails_in_flight_fails_the_request() -> None:
    bench = Bench(max_ahead=1)
    item = bench.add(make_item(1, 8))
    bench.turn()
    bench.sender.close_ticket(1, failed=ErrorCode.PEER_LOST)
    bench.turn(steps=0)
    assert item.request.block_table
    bench.turn()
    (failure,) = bench.of_type(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert isinstance(failure.error, PeerLostError)
    assert bench.of_type(FirstTokenSampled) == []
    bench.assert_over()


def test_what_broke_the_logits_of_a_cancelled_request_is_not_found_again() -> None:
    bench = Bench(max_ahead=1)
    item = bench.add(make_item(1, 8))
    bench.runner.broken_requests = {item.request_id}
    bench.turn()
    bench.cancel(item)
    bench.turn()
    assert bench.pool.count_prefix(item.request.block_hashes) == 0
    assert len(bench.of_type(RequestFailed)) == 1
    bench.drain()
    bench.assert_over()


def test_a_command_that_comes_while_the_last_step_runs_brings_the_next() -> None:
    bench = Bench(max_ahead=1)
    bench.runner.num_polls = 1000
    bench.add(make_item(1, 8))
    bench.turn()
    bench.loop.submit(AddRequest(make_item(2, 8)))
    assert bench.loop.step()  # finds nothing to launch, and the command
    assert bench.loop.step()  # the same, and decode's answer
    assert bench.loop.step()
    assert bench.runner.log == ["launch 0", "launch 1", "collect 0"]


def test_the_gap_is_measured_between_steps_that_follow_each_other() -> None:
    bench = Bench(max_ahead=1)
    bench.runner.idle_s = 0.25
    bench.add(make_item(1, 20))
    bench.turn(steps=5)
    assert bench.gaps == [0.25, 0.25]
    bench.add(make_item(2, 8))
    bench.turn(steps=3)
    assert len(bench.gaps) == 2, "nobody had work before the last step"
    assert bench.step_sizes == [8, 8, 4, 8], "each is told once it is over"


def test_a_loop_that_stops_takes_over_what_is_in_flight() -> None:
    bench = Bench(max_ahead=1)
    bench.runner.num_polls = 1000
    launched = threading.Event()
    bench.runner.before_step = launched.set
    bench.loop.submit(AddRequest(make_item(1, 8)))
    bench.loop.start()
    assert launched.wait(60)
    bench.loop.submit(StopLoop())
    assert bench.loop.join(60)
    assert bench.runner.log == ["launch 0", "collect 0"]
    (first,) = bench.of_type(FirstTokenSampled)
    assert isinstance(first, FirstTokenSampled)
    assert first.token_id == FIRST_TOKEN
    ended = bench.events[-1]
    assert isinstance(ended, LoopEnded)
    assert ended.error is None


def run_prompts(
    prompts: list[tuple[list[int], SamplingParams]], max_ahead: int, max_num_batched_tokens: int
) -> dict[int, FirstTokenSampled]:
    """Answers of a loop with a model, all prompts being there at once; blocks are few."""
    events: list[Event] = []
    num_blocks = 13
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE),
        max_num_seqs=3,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    sender = FakeTicketSender(lambda closure: loop.submit(RankClosed(0, closure)))
    loop = EngineLoop(
        scheduler,
        ModelRunner(
            FakeModel(), KVPool(num_blocks, 2, BLOCK_SIZE, KVSpec.shared(LATENT_DIM)), Sampler(50)
        ),
        SenderGroup(sender),
        grant_all(events.append, lambda command: loop.submit(command)),
        LoopSettings(max_model_len=64, push=PushSettings(num_layers=2), max_ahead=max_ahead),
    )
    for nonce, (prompt, sampling) in enumerate(prompts, start=1):
        item = make_item(nonce, len(prompt), sampling=sampling)
        item.request.prompt_token_ids[:] = prompt
        loop.submit(AddRequest(item))
    loop.take_commands()
    while scheduler.num_requests:
        loop.step()
        sender.close_all()
        loop.take_commands()
    scheduler.check_integrity()
    answers = [event for event in events if isinstance(event, FirstTokenSampled)]
    assert len(answers) == len(prompts)
    return {event.nonce: event for event in answers}


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    num_prompt_logprobs=st.sampled_from([-1, 1]),
    max_tokens=st.just(4),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(tokens, sampling_params), max_size=6), st.integers(1, 24))
def test_the_answers_are_those_of_steps_one_by_one(
    prompts: list[tuple[list[int], SamplingParams]], max_num_batched_tokens: int
) -> None:
    expected = run_prompts(prompts, 0, max_num_batched_tokens)
    answers = run_prompts(prompts, 1, max_num_batched_tokens)
    for nonce, answer in answers.items():
        logprobs = [entry.logprob for entry in answer.prompt_logprobs]
        assert logprobs == pytest.approx(
            [entry.logprob for entry in expected[nonce].prompt_logprobs], abs=1e-5
        )
        assert dataclasses.replace(
            answer, prompt_logprobs=(), queue_s=0.0, compute_s=0.0, num_cached_tokens=0
        ) == dataclasses.replace(
            expected[nonce], prompt_logprobs=(), queue_s=0.0, compute_s=0.0, num_cached_tokens=0
        )
