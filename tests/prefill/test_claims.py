"""Decode is asked late, kept informed, and told of every end, whichever side a request dies on."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from runtime.errors import LayoutMismatchError, OverloadedError, TandemError
from runtime.pb import common_pb2, prefill_pb2
from tests.prefill.fakes import FIRST_TOKEN
from tests.prefill.service_bench import Gate, ServiceBench, code_of, message_of, revoke
from tests.prefill.service_bench import service_bench as serve_bench
from tests.waiting import until


@pytest.fixture
async def bench() -> AsyncIterator[ServiceBench]:
    async with serve_bench() as served:
        yield served


async def claimed(bench: ServiceBench, num_claims: int = 1) -> None:
    """Wait until decode was asked so often."""
    await until(lambda: len(bench.decode.claims) >= num_claims)


async def test_an_idle_worker_asks_at_once_and_computes_when_there_is_room(
    bench: ServiceBench,
) -> None:
    bench.decode.claim_gate = asyncio.Event()
    call = asyncio.create_task(bench.run(1))
    await claimed(bench)
    assert bench.runner.steps == []
    bench.decode.claim_gate.set()
    token = await call
    assert isinstance(token, prefill_pb2.FirstToken)
    assert token.token_id == FIRST_TOKEN
    await bench.drain_senders()
    bench.assert_empty()


async def test_what_only_queues_here_has_no_place_in_decode() -> None:
    async with serve_bench(num_blocks=100) as bench:
        bench.runner.before_step = gate = Gate()
        calls = [asyncio.create_task(bench.run(nonce)) for nonce in range(1, 41)]
        await until(gate.reached.is_set)
        await until(lambda: len(bench.runs) == 40)
        assert len(bench.decode.claims) <= 8, "four of a step and four ahead of it"
        gate.opened.set()
        answers = await asyncio.gather(*calls)
        assert all(isinstance(answer, prefill_pb2.FirstToken) for answer in answers)
        await bench.drain_senders()
        assert sorted(bench.outcomes()) == [(nonce, "SENT") for nonce in range(1, 41)]
        bench.assert_empty()


async def test_requests_that_find_no_room_are_passed_by_others(bench: ServiceBench) -> None:
    bench.decode.claim_gate = gate = asyncio.Event()
    stuck = [asyncio.create_task(bench.run(nonce)) for nonce in range(1, 5)]
    await claimed(bench, 4)
    bench.decode.claim_gate = None
    assert isinstance(await bench.run(5), prefill_pb2.FirstToken)
    assert not any(call.done() for call in stuck)
    gate.set()
    for call in stuck:
        assert isinstance(await call, prefill_pb2.FirstToken)
    await bench.drain_senders()
    bench.assert_empty()


@pytest.mark.parametrize(
    "error",
    [LayoutMismatchError("num_layers: ours 3, theirs 4"), OverloadedError("no place")],
)
async def test_a_refused_claim_is_the_answer_and_there_is_nothing_to_close(
    bench: ServiceBench, error: TandemError
) -> None:
    bench.decode.claim_error = error
    answer = await bench.run(1)
    assert code_of(answer) == error.code.name
    assert error.message in message_of(answer)
    await bench.runs.wait_empty()
    assert bench.outcomes() == []
    bench.assert_empty()


async def test_a_decode_that_is_gone_is_a_lost_peer_by_name(bench: ServiceBench) -> None:
    answer = await bench.run(1, place_decode_address="127.0.0.1:1")
    assert code_of(answer) == "PEER_LOST"
    assert "decode-0" in message_of(answer)
    await bench.runs.wait_empty()
    bench.assert_empty()


async def test_the_requests_time_covers_the_wait_for_room(bench: ServiceBench) -> None:
    bench.decode.claim_gate = asyncio.Event()
    answer = await bench.run(1, timeout_s=1.0)
    assert code_of(answer) == "DEADLINE_EXCEEDED"
    assert message_of(answer).endswith("for the request are over while waiting for room in decode")
    await bench.runs.wait_empty()
    assert bench.outcomes() == [(1, "FAILED")], "a ticket may have been on its way"
    bench.assert_empty()


async def test_cancelling_the_call_cancels_the_claim(bench: ServiceBench) -> None:
    bench.decode.claim_gate = asyncio.Event()
    call = bench.stub.Run(bench.request(1))
    await claimed(bench)
    call.cancel()
    await until(lambda: bench.decode.num_cancelled_claims)
    await until(lambda: bench.decode.closures)
    assert bench.outcomes() == [(1, "ABANDONED")]
    bench.assert_empty()


async def test_a_ticket_that_comes_after_the_cancel_is_closed_unwritten(
    bench: ServiceBench,
) -> None:
    bench.decode.answer_gate = asyncio.Event()
    call = bench.stub.Run(bench.request(1))
    await claimed(bench)
    call.cancel()
    await until(lambda: bench.decode.closures)
    bench.decode.answer_gate.set()
    (part,) = bench.decode.parts_of(1)
    assert part.drained
    assert bench.outcomes() == [(1, "ABANDONED")]
    assert (bench.runner.steps, bench.sender.pushed) == ([], [])
    bench.assert_empty()


async def test_revoking_a_claim_answers_at_once(bench: ServiceBench) -> None:
    bench.decode.claim_gate = asyncio.Event()
    run = asyncio.create_task(bench.run(1))
    await claimed(bench)
    assert await revoke(bench, 1)
    assert code_of(await run) == "CANCELLED"
    bench.decode.claim_gate.set()
    await bench.runs.wait_empty()
    assert bench.runner.steps == []
    bench.assert_empty()


async def test_a_ticket_is_renewed_until_its_prompt_is_computed(bench: ServiceBench) -> None:
    bench.decode.transfer_timeout_s = 0.1
    bench.runner.before_step = gate = Gate()
    call = asyncio.create_task(bench.run(1))
    await until(lambda: len(bench.decode.renewals) >= 2)
    assert all(list(renewal.nonces) == [1] for renewal in bench.decode.renewals)
    gate.opened.set()
    assert isinstance(await call, prefill_pb2.FirstToken)
    num_renewals = len(bench.decode.renewals)
    await asyncio.sleep(0.5)
    assert len(bench.decode.renewals) == num_renewals, "now the transfer's time runs"
    await bench.drain_senders()


async def test_a_request_whose_ticket_decode_has_given_up_ends() -> None:
    async with serve_bench(max_num_batched_tokens=4) as bench:
        bench.decode.transfer_timeout_s = 0.1
        bench.runner.before_step = gate = Gate()
        call = asyncio.create_task(bench.run(1, 60))
        await until(lambda: bench.sender.open_tickets)
        del bench.decode.places[1]
        await until(lambda: bench.given_up == [1])
        gate.opened.set()
        assert code_of(await call) == "STALE_TICKET"
        assert "given up" in message_of(await call)
        await bench.drain_senders()
        bench.assert_empty()


class TicketAges:
    """How many steps decode holds memory for a prompt before it is computed."""

    def __init__(self, bench: ServiceBench) -> None:
        self._bench = bench
        self.all_here = threading.Event()
        self._claimed_at: dict[str, int] = {}

    def before_step(self) -> None:
        """Note the step before which each claim came; on the engine loop's thread."""
        assert self.all_here.wait(60.0)
        time.sleep(0.01)
        for claim in list(self._bench.decode.claims):
            self._claimed_at.setdefault(claim.request_id, len(self._bench.runner.steps))

    def ages(self) -> list[int]:
        """Of every prompt that was computed."""
        steps = self._bench.runner.steps
        return [
            number - self._claimed_at[request_id]
            for number, step in enumerate(steps)
            for request_id, _, _ in step
        ]


async def test_a_queue_longer_than_a_transfer_may_take_fails_nobody() -> None:
    async with serve_bench(num_blocks=400) as bench:
        bench.decode.transfer_timeout_s = 0.1
        tickets = TicketAges(bench)
        bench.runner.before_step = tickets.before_step
        calls = [asyncio.create_task(bench.run(nonce, timeout_s=240.0)) for nonce in range(1, 151)]
        await until(lambda: len(bench.runs) == 150)
        tickets.all_here.set()
        async with asyncio.timeout(240):
            while not all(call.done() for call in calls):
                bench.sender.close_all()
                await asyncio.sleep(0.01)
        answers = await asyncio.gather(*calls)
        assert [item for item in answers if not isinstance(item, prefill_pb2.FirstToken)] == []
        assert len(bench.runner.steps) >= 38
        assert max(tickets.ages()) <= 12, "steps of a ticket, of dozens of the queue"
        await bench.drain_senders()
        bench.assert_empty()


async def test_draining_gives_back_what_has_no_ticket_and_finishes_the_rest(
    bench: ServiceBench,
) -> None:
    bench.runner.before_step = gate = Gate()
    running = asyncio.create_task(bench.run(1))
    await until(gate.reached.is_set)
    bench.decode.claim_gate = asyncio.Event()
    queued = [asyncio.create_task(bench.run(nonce)) for nonce in range(2, 12)]
    await until(lambda: len(bench.runs) == 11)
    gate.opened.set()
    assert isinstance(await running, prefill_pb2.FirstToken)
    await claimed(bench, 5)
    drain = asyncio.ensure_future(bench.stub.Drain(common_pb2.DrainRequest(deadline_s=60.0)))
    for answer in await asyncio.gather(*queued):
        assert code_of(answer) == "DRAINING"
    assert bench.drains == [1]
    assert code_of(await bench.run(20)) == "DRAINING"
    assert not drain.done(), "the first is still sent"
    await bench.drain_senders()
    assert (await drain).num_requests_left == 0
    assert dict(bench.outcomes())[1] == "SENT"
    bench.assert_empty()


async def test_a_drain_whose_time_is_over_gives_back_all_without_a_first_token() -> None:
    async with serve_bench(max_num_batched_tokens=4) as bench:
        bench.runner.before_step = gate = Gate()
        call = asyncio.create_task(bench.run(1, 40))
        await until(gate.reached.is_set)
        long = asyncio.ensure_future(drain_within(bench, 60.0, timeout_s=60.0))
        left = await drain_within(bench, 0.0, timeout_s=2.0)
        assert left.num_requests_left == 1, "the shorter time counts"
        assert 0 < left.num_tokens_left <= 40, "what is still to be computed"
        gate.opened.set()
        assert code_of(await call) == "DRAINING"
        await bench.drain_senders()
        assert await long == common_pb2.DrainResponse()
        assert bench.outcomes() == [(1, "FAILED")]
        bench.assert_empty()


async def drain_within(
    bench: ServiceBench, deadline_s: float, *, timeout_s: float
) -> common_pb2.DrainResponse:
    request = common_pb2.DrainRequest(deadline_s=deadline_s)
    return await bench.stub.Drain(request, timeout=timeout_s)
