"""The engine loop step by step: first tokens, cancels in every state, deadlines, lost peers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import (
    AddRequest,
    CancelRequest,
    ClaimFailed,
    Event,
    FirstTokenSampled,
    GiveBack,
    LoopEnded,
    PartClosed,
    RankClosed,
    RequestFailed,
    RequestFinished,
    StopLoop,
    TicketClaimed,
    TicketWanted,
)
from prefill.rank_plan import ClosureOutcome
from prefill.request import PrefillRequest
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from runtime.errors import (
    DeadlineExceededError,
    DrainingError,
    ErrorCode,
    InternalError,
    OutOfBlocksError,
    PeerLostError,
    RequestCancelledError,
)
from runtime.sampling import FinishReason, SamplingParams
from tests.prefill.fakes import (
    BLOCK_SIZE,
    FIRST_TOKEN,
    Clock,
    FakeRunner,
    FakeTicketSender,
    make_grant,
    make_item,
)
from tests.waiting import wait_until
from worker.lifecycle import PrefillStatus


class Bench:
    """A loop with a fake model and a fake sender, driven by hand."""

    def __init__(
        self, num_blocks: int = 33, max_num_batched_tokens: int = 8, *, max_ahead: int = 0
    ) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.wanted: list[int] = []
        self.has_room = True
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool, max_num_seqs=4, max_num_batched_tokens=max_num_batched_tokens
        )
        self.runner = FakeRunner()
        self.sender = FakeTicketSender(lambda closure: self.loop.submit(RankClosed(0, closure)))
        self.gaps: list[float] = []
        self.step_sizes: list[int] = []
        push = PushSettings(num_layers=self.runner.num_layers)
        self.loop = EngineLoop(
            self.scheduler,
            self.runner,
            SenderGroup(self.sender),
            self._take,
            LoopSettings(max_model_len=64, push=push, idle_s=0.01, max_ahead=max_ahead),
            observe_gap=self.gaps.append,
            observe_step=lambda num_tokens, seconds: self.step_sizes.append(num_tokens),
            clock=self.clock,
        )

    def _take(self, event: Event) -> None:
        if isinstance(event, TicketWanted):
            self.wanted.append(event.nonce)
            if self.has_room:
                self.grant(event.nonce)
        else:
            self.events.append(event)

    def grant(self, nonce: int) -> None:
        self.loop.submit(TicketClaimed(nonce, make_grant(nonce)))

    def add(self, item: PrefillRequest) -> PrefillRequest:
        self.loop.submit(AddRequest(item))
        self.turn(steps=0)
        return item

    def turn(self, steps: int = 1) -> None:
        self.loop.take_commands()
        for _ in range(steps):
            self.loop.step()
            self.loop.take_commands()

    def cancel(self, item: PrefillRequest) -> None:
        self.loop.submit(CancelRequest(item.nonce, RequestCancelledError("client left")))
        self.turn(steps=0)

    def drain(self) -> None:
        self.sender.close_all()
        self.turn(steps=0)

    def of_type(self, event_type: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, event_type)]

    def assert_over(self, num_requests: int = 1) -> None:
        assert len(self.of_type(RequestFinished)) == num_requests
        assert self.scheduler.num_requests == 0
        assert not self.sender.open_tickets
        self.scheduler.check_integrity()


def outcome(bench: Bench) -> ClosureOutcome:
    (part,) = bench.of_type(PartClosed)
    assert isinstance(part, PartClosed)
    return part.closure.outcome


def test_a_request_is_answered_before_it_is_sent_and_ends_when_it_is_drained() -> None:
    bench = Bench()
    item = bench.add(make_item(1, 10))
    bench.turn(steps=1)
    assert bench.events == []
    bench.clock.now += 2.0
    bench.turn(steps=1)
    (token,) = bench.events
    assert isinstance(token, FirstTokenSampled)
    assert (token.token_id, token.finish_reason) == (FIRST_TOKEN, None)
    assert item.status is PrefillStatus.SENDING
    assert bench.loop.load.num_sending == 1
    assert bench.pool.num_free_blocks == bench.pool.num_usable_blocks - 3
    record = bench.sender.records[1]
    assert record is not None
    assert (record.nonce, record.epoch, record.first_token) == (1, 99, FIRST_TOKEN)
    bench.drain()
    assert outcome(bench) is ClosureOutcome.SENT
    bench.assert_over()


@pytest.mark.parametrize("max_ahead", [0, 1])
def test_first_tokens_leave_before_the_drafts_behind_them_are_made(max_ahead: int) -> None:
    """The layer for drafts still runs then; the record waits for what it drafts."""
    bench = Bench(max_ahead=max_ahead)
    bench.runner.drafts = 41
    waits: list[tuple[int, int]] = []
    bench.runner.at_collect = lambda: waits.append(
        (len(bench.of_type(FirstTokenSampled)), len(bench.sender.records))
    )
    sampling = SamplingParams(num_prompt_logprobs=0)
    item = bench.add(make_item(1, 10, sampling=sampling))
    bench.turn(steps=4)
    assert waits == [(0, 0), (1, 0)], "of the prompt's two steps, and of nothing else"
    (token,) = bench.events
    assert isinstance(token, FirstTokenSampled)
    assert len(token.prompt_logprobs) == 9
    assert item.request.output_token_ids == [FIRST_TOKEN]
    record = bench.sender.records[1]
    assert record is not None
    assert (record.first_token, record.first_draft) == (FIRST_TOKEN, 41)
    assert bench.runner.log[-2:] == ["sampled 1", "collect 1"]
    bench.drain()
    assert outcome(bench) is ClosureOutcome.SENT
    bench.assert_over()


@pytest.mark.parametrize("drafts", [0, 41])
def test_a_first_token_that_ends_the_request_stops_the_sender(drafts: int) -> None:
    bench = Bench()
    bench.runner.drafts = drafts
    sampling = SamplingParams(stop_token_ids=(FIRST_TOKEN,), max_tokens=9)
    bench.add(make_item(1, sampling=sampling))
    bench.turn()
    (token,) = bench.events
    assert isinstance(token, FirstTokenSampled)
    assert token.finish_reason is FinishReason.STOP
    assert bench.sender.open_tickets == {1: "abandoned"}
    assert 1 not in bench.sender.records
    bench.drain()
    (part,) = bench.of_type(PartClosed)
    assert isinstance(part, PartClosed)
    assert (part.finish_reason, part.error) == (FinishReason.STOP, None)
    bench.assert_over()


def test_no_kv_moves_when_the_first_token_is_known_to_be_the_last() -> None:
    bench = Bench()
    bench.add(make_item(1, sampling=SamplingParams(max_tokens=1), decode_goes_on=False))
    bench.turn()
    assert bench.sender.pushed == []
    bench.drain()
    bench.assert_over()


def test_prompt_logprobs_come_from_all_chunks() -> None:
    bench = Bench()
    bench.add(make_item(1, 20, sampling=SamplingParams(num_prompt_logprobs=0, max_tokens=5)))
    bench.turn(steps=3)
    (token,) = bench.events
    assert isinstance(token, FirstTokenSampled)
    assert len(token.prompt_logprobs) == 19


def types_of(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def test_decode_is_asked_as_soon_as_an_idle_worker_has_a_request() -> None:
    bench = Bench()
    bench.has_room = False
    item = bench.add(make_item(1))
    assert bench.wanted == [1]
    assert item.status is PrefillStatus.CLAIMING
    assert len(item.request.block_table) == 2
    bench.turn(steps=3)
    assert bench.runner.steps == []
    assert (bench.loop.load.num_claiming, bench.loop.load.num_waiting) == (1, 0)
    bench.grant(1)
    bench.turn()
    assert bench.runner.steps == [[("request-1", 0, 6)]]
    bench.drain()
    bench.assert_over()


def test_decode_is_asked_for_the_next_while_a_step_runs() -> None:
    bench = Bench(max_num_batched_tokens=4)
    seen: list[list[int]] = []
    bench.runner.before_step = lambda: seen.append(list(bench.wanted))
    for nonce in (1, 2, 3):
        bench.loop.submit(AddRequest(make_item(nonce, 8)))
    bench.turn()
    bench.turn()
    assert seen == [[1, 2]], "what comes next is claimed before the step before it is over"


@pytest.mark.parametrize("has_room", [False, True])
def test_cancel_before_the_first_chunk_ends_at_once_and_no_sender_hears_of_it(
    has_room: bool,
) -> None:
    bench = Bench()
    bench.has_room = has_room
    item = bench.add(make_item(1))
    bench.turn(steps=0)  # takes the ticket where there is one
    assert item.status is (PrefillStatus.RUNNING if has_room else PrefillStatus.CLAIMING)
    bench.cancel(item)
    assert types_of(bench.events) == [RequestFailed, RequestFinished]
    assert bench.scheduler.num_requests == 0
    bench.grant(1)  # it comes too late
    bench.turn()
    bench.assert_over()


def test_cancel_while_waiting_ends_at_once() -> None:
    bench = Bench(num_blocks=4)
    bench.add(make_item(1, 12))
    item = bench.add(make_item(2, 12))
    assert item.status is PrefillStatus.WAITING
    bench.cancel(item)
    assert types_of(bench.events) == [RequestFailed, RequestFinished]
    bench.turn(steps=2)
    bench.drain()
    bench.assert_over(2)


def test_a_claim_that_fails_ends_the_request_with_its_error() -> None:
    bench = Bench()
    bench.has_room = False
    bench.add(make_item(1))
    bench.loop.submit(ClaimFailed(1, PeerLostError("decode-0 is gone")))
    bench.turn()
    failed, finished = bench.events
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, PeerLostError)
    assert isinstance(finished, RequestFinished)
    bench.loop.submit(ClaimFailed(1, PeerLostError("again")))
    bench.turn()
    bench.assert_over()


def test_a_claim_without_room_does_not_hold_up_others() -> None:
    bench = Bench()
    bench.has_room = False
    bench.add(make_item(1, 8))
    bench.clock.now += 1.0
    bench.add(make_item(2, 8))
    bench.grant(2)
    bench.turn()
    assert bench.runner.steps == [[("request-2", 0, 8)]]
    bench.cancel(bench.scheduler.claiming[1])
    bench.drain()
    bench.assert_over(2)


def draining_bench() -> Bench:
    """One request that runs, one that has no ticket and one that waits for blocks."""
    bench = Bench(num_blocks=9)
    bench.add(make_item(1, 20))
    bench.turn()
    bench.has_room = False
    bench.add(make_item(2, 8))
    bench.add(make_item(3, 20))
    statuses = [item.status for item in bench.scheduler.unfinished()]
    assert statuses == [PrefillStatus.RUNNING, PrefillStatus.CLAIMING, PrefillStatus.WAITING]
    return bench


def test_what_has_no_ticket_is_given_back_and_the_rest_goes_on() -> None:
    bench = draining_bench()
    bench.loop.submit(GiveBack(DrainingError("use another one")))
    bench.turn(steps=0)
    failed = [event for event in bench.events if isinstance(event, RequestFailed)]
    assert [(event.nonce, event.error.request_id) for event in failed] == [
        (2, "request-2"),
        (3, "request-3"),
    ]
    assert all(isinstance(event.error, DrainingError) for event in failed)
    bench.turn(steps=2)
    assert [event.nonce for event in bench.of_type(FirstTokenSampled)] == [1]  # type: ignore[union-attr]
    bench.drain()
    bench.assert_over(3)


def test_at_the_end_of_the_time_all_without_a_first_token_is_given_back() -> None:
    bench = draining_bench()
    bench.loop.submit(GiveBack(DrainingError("use another one"), also_begun=True))
    bench.turn()
    assert len(bench.of_type(RequestFailed)) == 3
    assert bench.sender.open_tickets == {1: "abandoned"}
    bench.drain()
    bench.assert_over(3)


def test_cancel_while_running_computes_no_more_and_keeps_blocks_until_drained() -> None:
    bench = Bench()
    item = bench.add(make_item(1, 20))
    bench.turn()
    bench.cancel(item)
    assert item.status is PrefillStatus.SENDING
    bench.turn(steps=2)
    assert bench.runner.steps == [[("request-1", 0, 8)]]
    assert bench.pool.num_free_blocks < bench.pool.num_usable_blocks
    bench.drain()
    assert [type(event) for event in bench.events] == [RequestFailed, PartClosed, RequestFinished]
    bench.assert_over()


def test_cancel_while_sending_keeps_blocks_until_drained() -> None:
    bench = Bench()
    item = bench.add(make_item(1))
    bench.turn()
    bench.cancel(item)
    assert bench.sender.open_tickets == {1: "abandoned"}
    assert bench.pool.num_free_blocks < bench.pool.num_usable_blocks
    bench.drain()
    assert bench.of_type(RequestFailed) == []  # it was answered with its first token
    assert outcome(bench) is ClosureOutcome.ABANDONED
    bench.assert_over()


def test_cancel_when_finished_changes_nothing() -> None:
    bench = Bench()
    item = bench.add(make_item(1))
    bench.turn()
    bench.drain()
    num_events = len(bench.events)
    bench.cancel(item)
    assert len(bench.events) == num_events
    bench.assert_over()


def test_a_prompt_that_can_never_fit_is_answered_at_once() -> None:
    bench = Bench(num_blocks=3)
    bench.add(make_item(1, 3 * BLOCK_SIZE))
    failed = bench.events[0]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, OutOfBlocksError)
    bench.assert_over()


@pytest.mark.parametrize(
    ("num_steps", "has_room", "where"),
    [(0, False, "waiting for room in decode"), (1, True, "in prefill")],
)
def test_a_deadline_ends_a_request_that_has_no_token_yet(
    num_steps: int, has_room: bool, where: str
) -> None:
    bench = Bench()
    bench.has_room = has_room
    bench.add(make_item(1, 20, deadline=1010.0))
    bench.turn(steps=num_steps)
    bench.clock.now = 1010.0
    bench.turn()
    failed = bench.events[0]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, DeadlineExceededError)
    assert failed.error.message == f"10 s for the request are over while {where}"
    bench.drain()
    bench.assert_over()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (ErrorCode.PEER_LOST, ErrorCode.PEER_LOST),
        # Whatever broke in a lane, of each of its tickets only the KV did not arrive.
        (ErrorCode.INTERNAL, ErrorCode.TRANSFER_FAILED),
    ],
)
def test_a_sender_that_fails_midway_fails_the_request(said: ErrorCode, told: ErrorCode) -> None:
    bench = Bench()
    bench.add(make_item(1, 20))
    bench.turn()
    bench.sender.close_ticket(1, failed=said)
    bench.turn(steps=2)
    assert len(bench.runner.steps) == 1
    failed = bench.events[0]
    assert isinstance(failed, RequestFailed)
    assert (failed.error.code, failed.error.suspect) == (told, False)
    assert failed.error.request_id == "request-1"
    assert outcome(bench) is ClosureOutcome.FAILED
    bench.assert_over()


def test_a_sender_that_fails_after_the_first_token_closes_the_part_with_its_error() -> None:
    bench = Bench()
    bench.add(make_item(1))
    bench.turn()
    bench.sender.close_ticket(1, failed=ErrorCode.TRANSFER_FAILED)
    bench.turn(steps=0)
    assert bench.of_type(RequestFailed) == []
    (part,) = bench.of_type(PartClosed)
    assert isinstance(part, PartClosed)
    assert part.error is not None
    assert part.error.code is ErrorCode.TRANSFER_FAILED
    bench.assert_over()


def test_logits_that_are_no_numbers_fail_their_request_alone() -> None:
    bench = Bench(max_num_batched_tokens=32)
    broken, fine = bench.add(make_item(1)), bench.add(make_item(2))
    bench.runner.broken_requests = {broken.request_id}
    bench.turn()
    (failure,) = bench.of_type(RequestFailed)
    assert isinstance(failure, RequestFailed)
    assert failure.nonce == broken.nonce
    assert isinstance(failure.error, InternalError)
    assert failure.error.request_id == broken.request_id
    (first,) = bench.of_type(FirstTokenSampled)
    assert isinstance(first, FirstTokenSampled)
    assert first.nonce == fine.nonce
    # What may have made its numbers unusable must not answer a later prompt.
    pool = bench.scheduler.pool
    assert pool.count_prefix(broken.request.block_hashes) == 0
    assert pool.count_prefix(fine.request.block_hashes) == len(fine.request.block_hashes) > 0
    bench.drain()
    bench.assert_over(num_requests=2)


def test_a_ticket_is_opened_with_the_time_that_decode_gave_it() -> None:
    bench = Bench()
    opened: list[float] = []
    bench.sender.open = lambda ticket, peer: opened.append(ticket.timeout_s)  # type: ignore[method-assign]
    bench.add(make_item(1, deadline=1030.0))
    bench.clock.now += 10.0
    bench.turn()
    assert opened == [60.0], "neither the queue nor the request's time is in it"


def test_the_thread_sleeps_until_there_is_work_and_stops_when_told() -> None:
    bench = Bench()
    bench.loop.start()
    bench.loop.submit(AddRequest(make_item(1)))
    wait_until(lambda: len(bench.of_type(FirstTokenSampled)) == 1)
    bench.sender.close_all()
    wait_until(lambda: len(bench.of_type(RequestFinished)) == 1)
    bench.loop.submit(StopLoop())
    assert bench.loop.join(60)
    ended = bench.events[-1]
    assert isinstance(ended, LoopEnded)
    assert ended.error is None


def test_when_the_loop_dies_every_waiting_request_is_answered() -> None:
    bench = Bench()
    bench.runner.failure = RuntimeError("device lost")
    for nonce in (1, 2, 3):
        bench.loop.submit(AddRequest(make_item(nonce, 12)))
    bench.loop.start()
    assert bench.loop.join(60)
    failures = bench.of_type(RequestFailed)
    assert {event.nonce for event in failures if isinstance(event, RequestFailed)} == {1, 2, 3}
    for event in failures:
        assert isinstance(event, RequestFailed)
        assert type(event.error) is InternalError
        text = "prefill rank 0 of 1 failed: RuntimeError: device lost"
        assert event.error.message == text
    ended = bench.events[-1]
    assert isinstance(ended, LoopEnded)
    assert type(ended.error) is InternalError


def test_what_is_left_when_the_loop_is_told_to_stop_may_go_elsewhere() -> None:
    bench = Bench()
    for command in (AddRequest(make_item(1, 12)), StopLoop(), AddRequest(make_item(2))):
        bench.loop.submit(command)
    bench.loop.start()
    assert bench.loop.join(60)
    (failed,) = bench.of_type(RequestFailed)  # nobody took the second on
    assert isinstance(failed, RequestFailed)
    assert type(failed.error) is DrainingError
    assert failed.error.request_id == "request-1"
    assert failed.error.message.startswith("prefill rank 0 of 1 was told to stop")


happenings = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("fail"), st.integers(0, 20)),
        st.tuples(st.just("break"), st.integers(0, 20)),
        st.tuples(st.just("step")),
        st.tuples(st.just("drain")),
        st.tuples(st.just("wait")),
        st.tuples(st.just("room"), st.booleans()),
        st.tuples(st.just("grant"), st.integers(0, 20)),
        st.tuples(st.just("refuse"), st.integers(0, 20)),
        st.tuples(st.just("give back"), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(happenings, st.integers(4, 20), st.integers(0, 1), st.integers(0, 2))
def test_whatever_happens_each_request_is_answered_once_and_leaves_nothing(
    events: list[tuple[object, ...]], num_blocks: int, max_ahead: int, num_polls: int
) -> None:
    bench = Bench(num_blocks, max_ahead=max_ahead)
    bench.runner.num_polls = num_polls
    items: list[PrefillRequest] = []
    for event in events:
        match event:
            case ("add", int(num_tokens), bool(stops)):
                stop_ids = (FIRST_TOKEN,) if stops else ()
                sampling = SamplingParams(stop_token_ids=stop_ids)
                deadline = bench.clock.now + 3.0
                nonce = len(items) + 1
                item = make_item(nonce, num_tokens, sampling=sampling, deadline=deadline)
                items.append(bench.add(item))
            case ("cancel", int(index)) if items:
                bench.cancel(items[index % len(items)])
            case ("fail", int(index)) if bench.sender.open_tickets:
                open_nonces = list(bench.sender.open_tickets)
                nonce = open_nonces[index % len(open_nonces)]
                bench.sender.close_ticket(nonce, failed=ErrorCode.PEER_LOST)
            case ("break", int(index)):
                bench.runner.broken_requests.add(f"request-{index}")
            case ("step",):
                bench.turn()
                bench.pool.check_integrity()
            case ("drain",):
                bench.drain()
            case ("wait",):
                bench.clock.now += 1.0
            case ("room", bool(has_room)):
                bench.has_room = has_room
            case ("grant", int(index)) if bench.wanted:
                bench.grant(bench.wanted[index % len(bench.wanted)])
            case ("refuse", int(index)) if bench.wanted:
                nonce = bench.wanted[index % len(bench.wanted)]
                bench.loop.submit(ClaimFailed(nonce, PeerLostError("decode-0 is gone")))
            case ("give back", bool(also_begun)):
                bench.loop.submit(GiveBack(DrainingError("elsewhere"), also_begun=also_begun))
    bench.has_room = True
    for nonce in bench.wanted:
        bench.grant(nonce)
    for _ in range(200):
        bench.turn()
        bench.drain()
    bench.assert_over(len(items))
    for item in items:
        mine = [event for event in bench.events if getattr(event, "nonce", 0) == item.nonce]
        answers = [event for event in mine if isinstance(event, FirstTokenSampled | RequestFailed)]
        assert len(answers) == 1
        num_parts = len([event for event in mine if isinstance(event, PartClosed)])
        assert num_parts == (item.started_at > 0)
        assert isinstance(mine[-1], RequestFinished)
        assert item.status is PrefillStatus.FINISHED
