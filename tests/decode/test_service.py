"""The whole worker over real gRPC and the real loopback transport: every way in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio
import pytest

from runtime.errors import InternalError
from runtime.pb import common_pb2, decode_pb2
from tests.decode.cluster import DecodeCluster, run_cluster
from tests.decode.imagined import expected_output
from worker.lifecycle import DecodeStatus

pytestmark = pytest.mark.usefixtures("overlap")

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11]


async def test_a_request_from_reserve_to_its_last_frame() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT, max_tokens=6)
        assert len(ticket.block_ids) == 3
        assert ticket.nonce
        first = cluster.prefill.run(ticket, PROMPT)
        tokens = await cluster.router.tokens_of("a")
        assert [first, *tokens] == expected_output(PROMPT, 6)
        deltas = cluster.router.deltas["a"]
        assert deltas[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert deltas[0].HasField("timings")
        assert deltas[-1].HasField("timings")
        await cluster.wait_empty()
        assert (await cluster.load()).num_free_blocks == 32


async def test_a_router_that_reads_rows_gets_plain_tokens_in_them() -> None:
    async with run_cluster() as cluster:
        request = cluster.request("a", PROMPT, max_tokens=6)
        request.row_id = 77
        ticket = await cluster.prefill.ticket(cluster.prefill.claim(await cluster.place(request)))
        first = cluster.prefill.run(ticket, PROMPT)
        deltas = await cluster.router.end_of("a")
        rows = [frame.rows for frame in cluster.router.frames if frame.HasField("rows")]
        assert {row_id for row in rows for row_id in row.row_ids} <= {77}
        tokens = {
            index: i
            for row in rows
            for index, i in zip(row.start_indexes, row.token_ids, strict=True)
        }
        assert set(tokens) <= {2, 3, 4}  # those of one frame with the first news are deltas
        tokens |= {0: first} | {delta.start_index: delta.token_ids[0] for delta in deltas}
        assert [tokens[index] for index in range(6)] == expected_output(PROMPT, 6)


async def test_many_at_once_share_frames_and_keep_apart() -> None:
    async with run_cluster(max_num_seqs=4) as cluster:
        prompts = {f"r{i}": [(i * 37 + j * 11) % 900 for j in range(5 + i)] for i in range(10)}

        async def one(request_id: str, prompt: list[int]) -> list[int]:
            ticket = await cluster.reserve(request_id, prompt, max_tokens=9)
            first = cluster.prefill.run(ticket, prompt)
            return [first, *await cluster.router.tokens_of(request_id)]

        outputs = await asyncio.gather(*(one(*item) for item in prompts.items()))
        assert outputs == [expected_output(prompt, 9) for prompt in prompts.values()]
        await cluster.wait_empty()


async def test_the_cached_prefix_is_not_sent_again() -> None:
    async with run_cluster() as cluster:
        first = await cluster.reserve("a", PROMPT)
        assert first.num_cached_tokens == 0
        cluster.prefill.run(first, PROMPT)
        await cluster.router.end_of("a")
        again = await cluster.reserve("b", PROMPT)
        assert again.num_cached_tokens == 8
        assert len(again.block_ids) == 1
        token = cluster.prefill.run(again, PROMPT)
        assert [token, *await cluster.router.tokens_of("b")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_preemption_keeps_every_token() -> None:
    async with run_cluster(num_blocks=13, enable_prefix_caching=False) as cluster:
        prompts = {f"r{i}": [(i * 31 + j * 7) % 900 for j in range(9)] for i in range(3)}

        async def one(request_id: str, prompt: list[int]) -> list[int]:
            ticket = await cluster.reserve(request_id, prompt, max_tokens=24)
            first = cluster.prefill.run(ticket, prompt)
            return [first, *await cluster.router.tokens_of(request_id)]

        # Two are let in, at half of their possible growth; both take all of it.
        outputs = await asyncio.gather(*(one(*item) for item in prompts.items()))
        assert outputs == [expected_output(prompt, 24) for prompt in prompts.values()]
        await cluster.wait_empty()
        assert cluster.worker.registry.get_sample_value("pd_decode_preemptions_total") != 0


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], common_pb2.ERROR_CODE_INVALID_REQUEST),
        ([5] * 100, common_pb2.ERROR_CODE_INVALID_REQUEST),
        ([5, 1000], common_pb2.ERROR_CODE_INVALID_REQUEST),
        ([5] * 60, common_pb2.ERROR_CODE_OUT_OF_BLOCKS),
    ],
)
async def test_what_can_never_run_is_rejected_at_once(
    prompt: list[int], code: common_pb2.ErrorCode
) -> None:
    async with run_cluster(num_blocks=9) as cluster:
        error = await cluster.refusal(cluster.request("a", prompt))
        assert error.code == code
        assert error.request_id == "a"
        await cluster.wait_empty()


async def test_reserve_is_answered_while_a_step_runs() -> None:
    async with run_cluster() as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        cluster.runner.go.clear()
        cluster.prefill.run(holder, PROMPT)
        while not cluster.runner.is_launched.is_set():
            await asyncio.sleep(0.005)
        reservation = await cluster.place(cluster.request("a", PROMPT))
        assert reservation.nonce
        refused = await cluster.refusal(cluster.request("a", PROMPT))
        assert "request id a is in use" in refused.message
        cluster.runner.go.set()
        ticket = await cluster.prefill.ticket(cluster.prefill.claim(reservation))
        assert ticket.nonce == reservation.nonce
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        await cluster.wait_empty()


async def test_a_place_is_free_again_however_its_request_ends() -> None:
    async with run_cluster(max_num_reserved=2) as cluster:
        for _ in range(3):
            await cluster.place(cluster.request("a", PROMPT))
            await cluster.place(cluster.request("b", PROMPT))
            error = await cluster.refusal(cluster.request("c", PROMPT))
            assert error.code == common_pb2.ERROR_CODE_OVERLOADED
            for request_id in "ab":
                await cluster.stub.Abort(decode_pb2.AbortRequest(request_id=request_id))
            while len(cluster.driver._places):
                await asyncio.sleep(0.005)
            unusable = cluster.request("d", [5, 1000])
            assert (await cluster.refusal(unusable)).code == common_pb2.ERROR_CODE_INVALID_REQUEST
            # Its first token ends it: no delta says so.
            ticket = await cluster.reserve("e", PROMPT, max_tokens=1)
            cluster.prefill.run(ticket, PROMPT)
            while len(cluster.driver._places):
                await asyncio.sleep(0.005)
        assert "d" not in cluster.router.deltas
        assert "e" not in cluster.router.deltas


async def test_a_claim_waits_for_blocks() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        call = await cluster.claim("late", PROMPT)
        await cluster.wait_for(DecodeStatus.CLAIMED)
        cluster.prefill.run(holder, PROMPT)
        ticket = await cluster.prefill.ticket(call)
        token = cluster.prefill.run(ticket, PROMPT)
        assert [token, *await cluster.router.tokens_of("late")] == expected_output(PROMPT, 8)
        timings = cluster.router.deltas["late"][0].timings
        assert timings.decode_reserve_s > 0
        await cluster.wait_empty()


async def test_a_request_without_ticket_can_leave_and_one_with_ticket_stays() -> None:
    async with run_cluster(num_blocks=6) as cluster:

        async def leaves(request_id: str) -> bool:
            request = decode_pb2.AbortRequest(request_id=request_id, only_without_ticket=True)
            return (await cluster.stub.Abort(request)).known

        holder = await cluster.reserve("holder", PROMPT)
        assert (await cluster.load()).num_requests_blocked == 0
        claim = await cluster.claim("late", PROMPT)
        await cluster.wait_for(DecodeStatus.CLAIMED)
        await cluster.place(cluster.request("reserved", PROMPT))
        assert (await cluster.load()).num_requests_blocked == 1
        assert not await leaves("holder")
        assert await leaves("reserved")
        assert await leaves("late")
        assert not await leaves("late"), "it has left"
        assert (await claim).error.code == common_pb2.ERROR_CODE_CANCELLED
        assert (await cluster.load()).num_requests_blocked == 0
        token = cluster.prefill.run(holder, PROMPT)
        assert [token, *await cluster.router.tokens_of("holder")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_a_cancelled_claim_gives_back_its_turn_and_can_be_made_again() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        reservation = await cluster.place(cluster.request("late", PROMPT))
        call = cluster.prefill.claim(reservation)
        await cluster.wait_for(DecodeStatus.CLAIMED)
        call.cancel()
        await cluster.wait_for(DecodeStatus.RESERVED)
        cluster.prefill.run(holder, PROMPT)
        await cluster.router.end_of("holder")
        assert (await cluster.load()).num_free_blocks == 5
        ticket = await cluster.prefill.ticket(cluster.prefill.claim(reservation))
        token = cluster.prefill.run(ticket, PROMPT)
        assert [token, *await cluster.router.tokens_of("late")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_a_queued_request_meets_its_deadline() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        await cluster.reserve("holder", PROMPT)
        request = cluster.request("late", PROMPT)
        request.timeout_s = 2.0
        answer = await cluster.prefill.claim(await cluster.place(request))
        (last,) = await cluster.router.end_of("late")
        for error in (answer.error, last.error):
            assert error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
            assert "queued for KV blocks" in error.message
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="holder"))
        await cluster.wait_empty()


async def test_an_abort_whose_caller_stops_waiting_is_carried_out() -> None:
    """A router waits for seconds, and a step may take longer."""
    async with run_cluster() as cluster:
        for request_id in ("a", "holder"):
            ticket = await cluster.reserve(request_id, PROMPT, max_tokens=80)
        cluster.runner.go.clear()
        cluster.prefill.run(ticket, PROMPT)
        while not cluster.runner.is_awaited.is_set():
            await asyncio.sleep(0.005)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"), timeout=2.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.sleep(0.1)  # the server has noticed, too
        cluster.runner.go.set()
        assert (await cluster.router.end_of("a"))[-1].error.code == common_pb2.ERROR_CODE_CANCELLED
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="holder"))
        await cluster.wait_empty()


@pytest.mark.parametrize("num_output", [0, 1, 3, 7])
async def test_a_request_goes_on_where_an_earlier_try_ended(num_output: int) -> None:
    async with run_cluster() as cluster:
        expected = expected_output(PROMPT, 8)
        context = [*PROMPT, *expected[:num_output]]
        ticket = await cluster.reserve("a", context, num_output)
        token = cluster.prefill.run(ticket, context)
        assert token == expected[num_output]
        if num_output < 7:
            assert await cluster.router.tokens_of("a") == expected[num_output + 1 :]
        await cluster.wait_empty()


async def test_a_stream_that_breaks_costs_no_token() -> None:
    async with run_cluster() as cluster:
        cluster.runner.step_s = 0.01
        first = {}
        for request_id, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
            count = 60 if request_id == "a" else 8
            ticket = await cluster.reserve(request_id, prompt, max_tokens=count)
            first[request_id] = cluster.prefill.run(ticket, prompt)
        router = cluster.router
        while len(router.deltas.get("a", [])) < 4:
            await asyncio.sleep(0.005)
        assert router.reading is not None
        router.reading.cancel()
        await asyncio.gather(router.reading, return_exceptions=True)
        # What came last never reached the router; and meanwhile b ends.
        heard = router.deltas = {name: items[:2] for name, items in router.deltas.items()}
        await asyncio.sleep(0.2)
        points = [
            decode_pb2.ResumePoint(request_id=name, next_index=1 + len(heard.get(name, [])))
            for name in ("a", "b")
        ]
        stranger = decode_pb2.ResumePoint(request_id="stranger", next_index=3)
        router.reading = asyncio.ensure_future(router.read(*points, stranger))
        assert [first["b"], *await router.tokens_of("b")] == expected_output(PROMPT[::-1], 8)
        assert [first["a"], *await router.tokens_of("a")] == expected_output(PROMPT, 60)
        (lost,) = await router.end_of("stranger")
        assert lost.error.code == common_pb2.ERROR_CODE_PEER_LOST
        await cluster.wait_empty()


async def hold_a_place(cluster: DecodeCluster) -> None:
    await cluster.place(cluster.request("a", PROMPT))


async def hold_nothing(cluster: DecodeCluster) -> None:
    await cluster.reserve("other", PROMPT)
    await cluster.claim("a", PROMPT)
    await cluster.wait_for(DecodeStatus.CLAIMED)


async def hold_ticket(cluster: DecodeCluster) -> None:
    await cluster.reserve("a", PROMPT)


async def hold_open_ticket(cluster: DecodeCluster) -> None:
    ticket = await cluster.reserve("a", PROMPT)
    cluster.prefill.open(ticket)
    cluster.prefill.push(ticket, PROMPT)


async def hold_arrived(cluster: DecodeCluster) -> None:
    ticket = await cluster.reserve("a", PROMPT, max_tokens=80)
    cluster.runner.step_s = 0.1
    cluster.prefill.run(ticket, PROMPT)
    while not cluster.router.deltas.get("a"):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "reach",
    [hold_a_place, hold_nothing, hold_ticket, hold_open_ticket, hold_arrived],
    ids=lambda f: f.__name__,
)
async def test_abort_in_every_state_frees_everything(
    reach: Callable[[DecodeCluster], Awaitable[None]],
) -> None:
    num_blocks = 6 if reach is hold_nothing else 33
    async with run_cluster(num_blocks=num_blocks) as cluster:
        await reach(cluster)
        for known in (True, False):  # idempotent
            response = await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
            assert response.known is known
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="other"))
        await cluster.wait_empty()
        assert (await cluster.router.end_of("a"))[-1].error.code == common_pb2.ERROR_CODE_CANCELLED
        assert (await cluster.load()).num_quarantined_blocks == 0


async def test_a_late_write_never_reaches_the_next_owner() -> None:
    async with run_cluster(num_blocks=6, enable_prefix_caching=False) as cluster:
        cluster.prefill.answers_revoke = False
        cancelled = await cluster.reserve("a", PROMPT)
        cluster.prefill.open(cancelled)
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        assert (await cluster.load()).num_quarantined_blocks == 3
        # Nobody gets the blocks while the writer is still at it.
        call = await cluster.claim("b", PROMPT[::-1])
        await cluster.wait_for(DecodeStatus.CLAIMED)
        # The writer, late: everything lands in quarantine; then it closes.
        cluster.prefill.push(cancelled, PROMPT)
        cluster.prefill.finish(cancelled, 3)
        ticket = await cluster.prefill.ticket(call)
        token = cluster.prefill.run(ticket, PROMPT[::-1])
        output = [token, *await cluster.router.tokens_of("b")]
        assert output == expected_output(PROMPT[::-1], 8)
        await cluster.wait_empty()


async def test_a_silent_writer_is_fenced_and_its_ticket_is_void() -> None:
    async with run_cluster(quarantine_timeout_s=0.3) as cluster:
        cluster.prefill.answers_revoke = False
        ticket = await cluster.reserve("a", PROMPT)
        cluster.prefill.open(ticket)
        cluster.prefill.push(ticket, PROMPT)
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        await cluster.wait_empty()
        assert cluster.worker.registry.get_sample_value("pd_decode_fences_total") == 1
        assert cluster.prefill.revoked == [ticket.nonce]
        # It wakes up: its connection is gone, and the rest cannot land. Its next claim mends that.
        cluster.prefill.finish(ticket, 3)
        while len(cluster.prefill.reports) < 2:
            await asyncio.sleep(0.01)
        again = await cluster.reserve("b", PROMPT)
        token = cluster.prefill.run(again, PROMPT)
        assert [token, *await cluster.router.tokens_of("b")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_the_kv_never_comes() -> None:
    async with run_cluster(transfer_timeout_s=0.3) as cluster:
        await cluster.reserve("a", PROMPT)
        error = (await cluster.router.end_of("a"))[-1].error
        assert error.code == common_pb2.ERROR_CODE_TRANSFER_FAILED
        assert "waiting for prefill-0 to send the KV" in error.message
        await cluster.wait_empty()


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (decode_pb2.TICKET_OUTCOME_ABANDONED, common_pb2.ERROR_CODE_CANCELLED),
        (decode_pb2.TICKET_OUTCOME_FAILED, common_pb2.ERROR_CODE_TRANSFER_FAILED),
    ],
)
async def test_a_writer_that_gives_up_ends_the_request(
    outcome: decode_pb2.TicketOutcome, code: common_pb2.ErrorCode
) -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        cluster.prefill.open(ticket)
        cluster.prefill.abandon(ticket, outcome)
        assert (await cluster.router.end_of("a"))[-1].error.code == code
        await cluster.wait_empty()


async def test_a_first_token_that_ends_the_request_frees_it_silently() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        cluster.prefill.open(ticket)
        cluster.prefill.abandon(ticket, decode_pb2.TICKET_OUTCOME_NOT_NEEDED)
        await cluster.wait_empty()
        assert "a" not in cluster.router.deltas
        # Also where it arrives all the same.
        ticket = await cluster.reserve("b", PROMPT, max_tokens=1)
        cluster.prefill.outcome = decode_pb2.TICKET_OUTCOME_SENT
        cluster.prefill.run(ticket, PROMPT)
        await cluster.wait_empty()
        assert "b" not in cluster.router.deltas


async def test_stale_closings_are_refused() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        stale = decode_pb2.TransferTicket()
        stale.CopyFrom(ticket)
        stale.nonce ^= 1
        sent = decode_pb2.TICKET_OUTCOME_SENT
        response = await cluster.prefill.close_ticket(stale, 0, sent)
        assert list(response.unknown) == [stale.nonce]
        assert not response.HasField("error")
        response = await cluster.prefill.close_ticket(ticket, 2, sent)
        assert list(response.unknown) == [ticket.nonce], "no rank of this writer"
        stale.nonce, stale.decode.epoch = ticket.nonce, ticket.decode.epoch + 1
        response = await cluster.prefill.close_ticket(stale, 0, sent)
        assert response.error.code == common_pb2.ERROR_CODE_STALE_TICKET
        assert (await cluster.load()).num_requests_waiting == 1


async def test_unusable_logits_fail_one_request_alone() -> None:
    async with run_cluster() as cluster:
        cluster.runner.unusable.add("bad")
        other = PROMPT[::-1]
        good, bad = await cluster.reserve("good", PROMPT), await cluster.reserve("bad", other)
        cluster.prefill.run(bad, other)
        first = cluster.prefill.run(good, PROMPT)
        assert (await cluster.router.end_of("bad"))[-1].error.code == common_pb2.ERROR_CODE_INTERNAL
        assert [first, *await cluster.router.tokens_of("good")] == expected_output(PROMPT, 8)
        # Its KV may be what the numbers were lost in: the next request must not find it.
        again = await cluster.reserve("again", other)
        assert again.num_cached_tokens == 0
        token = cluster.prefill.run(again, other)
        assert [token, *await cluster.router.tokens_of("again")] == expected_output(other, 8)
        await cluster.wait_empty()


async def test_a_renewal_that_ended_ends_the_worker() -> None:
    async with run_cluster() as cluster:
        main = asyncio.ensure_future(cluster.worker.main_loop())
        cluster.worker._membership._leases[0]._task.cancel()
        with pytest.raises(InternalError, match="not renewed"):
            await asyncio.wait_for(main, 60)


async def test_a_broken_step_answers_everybody_and_ends_the_worker() -> None:
    async with run_cluster() as cluster:
        cluster.runner.error = RuntimeError("the device is gone")
        waiting = await cluster.reserve("waiting", PROMPT)
        ticket = await cluster.reserve("running", PROMPT)
        main = asyncio.ensure_future(cluster.worker.main_loop())
        cluster.prefill.run(ticket, PROMPT)
        for request_id in ("running", "waiting"):
            error = (await cluster.router.end_of(request_id))[-1].error
            assert error.code == common_pb2.ERROR_CODE_INTERNAL
            assert "the device is gone" in error.message
        with pytest.raises(Exception, match="the device is gone"):
            await asyncio.wait_for(main, 60)
        late = await cluster.refusal(cluster.request("late", PROMPT))
        assert late.code == common_pb2.ERROR_CODE_DRAINING, "others may serve it"
        assert waiting.nonce != ticket.nonce


async def test_draining_refuses_new_requests_and_lets_the_rest_finish() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        await cluster.place(cluster.request("reserved", PROMPT))
        drain = asyncio.ensure_future(_drain(cluster, 30.0))
        (last,) = await cluster.router.end_of("reserved")
        assert last.error.code == common_pb2.ERROR_CODE_DRAINING
        refused = await cluster.refusal(cluster.request("b", PROMPT))
        assert refused.code == common_pb2.ERROR_CODE_DRAINING
        assert not drain.done()
        token = cluster.prefill.run(ticket, PROMPT)
        assert [token, *await cluster.router.tokens_of("a")] == expected_output(PROMPT, 8)
        assert (await drain).num_requests_left == 0
        while not cluster.registry.was_draining:
            await asyncio.sleep(0.01)


async def test_a_drain_that_is_over_gives_the_rest_back() -> None:
    async with run_cluster() as cluster:
        cluster.runner.step_s = 0.1
        ticket = await cluster.reserve("a", PROMPT, max_tokens=80)
        slow = asyncio.ensure_future(_drain(cluster, 30.0))
        cluster.prefill.run(ticket, PROMPT)
        while not cluster.router.deltas.get("a"):
            await asyncio.sleep(0.005)
        assert 0 < (await _drain(cluster, 30.0, timeout_s=2.0)).num_tokens_left <= 80
        assert (await _drain(cluster, 0.1)).num_requests_left == 0, "the shorter time counts"
        assert (await slow).num_requests_left == 0
        last = (await cluster.router.end_of("a"))[-1]
        assert last.finish_reason == common_pb2.FINISH_REASON_ERROR
        assert last.error.code == common_pb2.ERROR_CODE_DRAINING
        assert (await _drain(cluster, 0.0)).num_requests_left == 0
        await cluster.wait_empty()


async def test_the_worker_itself_gives_back_what_it_cannot_finish() -> None:
    async with run_cluster() as cluster:
        cluster.worker.grace_s = 0.1
        await cluster.reserve("a", PROMPT)
        async with asyncio.timeout(60):
            await cluster.worker.drain()
        assert (await cluster.router.end_of("a"))[-1].error.code == common_pb2.ERROR_CODE_DRAINING


async def _drain(
    cluster: DecodeCluster, deadline_s: float, timeout_s: float = 60.0
) -> common_pb2.DrainResponse:
    response: common_pb2.DrainResponse = await cluster.stub.Drain(
        common_pb2.DrainRequest(deadline_s=deadline_s), timeout=timeout_s
    )
    return response
