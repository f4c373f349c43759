"""The whole worker over real gRPC and the real loopback transport: every way in and out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from runtime.errors import InternalError
from runtime.pb import common_pb2, decode_pb2
from tests.decode.cluster import DecodeCluster, expected_output, run_cluster

pytestmark = pytest.mark.usefixtures("overlap")

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11]


async def test_a_request_from_reserve_to_its_last_frame() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT, max_tokens=6)
        assert len(ticket.block_ids) == 3
        assert ticket.nonce
        first = await cluster.prefill.run(ticket, PROMPT)
        tokens = await cluster.router.tokens_of("a")
        assert [first, *tokens] == expected_output(PROMPT, 6)
        deltas = cluster.router.deltas["a"]
        assert deltas[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert deltas[0].HasField("timings")
        assert deltas[-1].HasField("timings")
        await cluster.wait_empty()
        assert (await cluster.load()).num_free_blocks == 32


async def test_many_at_once_share_frames_and_keep_apart() -> None:
    async with run_cluster(max_num_seqs=4) as cluster:
        prompts = {f"r{i}": [(i * 37 + j * 11) % 900 for j in range(5 + i)] for i in range(10)}

        async def one(request_id: str, prompt: list[int]) -> list[int]:
            ticket = await cluster.reserve(request_id, prompt, max_tokens=9)
            first = await cluster.prefill.run(ticket, prompt)
            return [first, *await cluster.router.tokens_of(request_id)]

        outputs = await asyncio.gather(*(one(*item) for item in prompts.items()))
        assert outputs == [expected_output(prompt, 9) for prompt in prompts.values()]
        await cluster.wait_empty()


async def test_the_cached_prefix_is_not_sent_again() -> None:
    async with run_cluster() as cluster:
        first = await cluster.reserve("a", PROMPT)
        assert first.num_cached_tokens == 0
        await cluster.prefill.run(first, PROMPT)
        await cluster.router.end_of("a")
        again = await cluster.reserve("b", PROMPT)
        assert again.num_cached_tokens == 8
        assert len(again.block_ids) == 1
        token = await cluster.prefill.run(again, PROMPT)
        assert [token, *await cluster.router.tokens_of("b")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_preemption_keeps_every_token() -> None:
    async with run_cluster(num_blocks=13, enable_prefix_caching=False) as cluster:
        prompts = {f"r{i}": [(i * 31 + j * 7) % 900 for j in range(9)] for i in range(3)}

        async def one(request_id: str, prompt: list[int]) -> list[int]:
            ticket = await cluster.reserve(request_id, prompt, max_tokens=24)
            first = await cluster.prefill.run(ticket, prompt)
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
        updates = [u async for u in cluster.stub.Reserve(cluster.request("a", prompt))]
        assert [u.WhichOneof("update") for u in updates] == ["rejected"]
        assert updates[0].rejected.code == code
        assert updates[0].rejected.request_id == "a"
        await cluster.wait_empty()


async def test_a_full_pool_queues_and_says_so() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        call = cluster.stub.Reserve(cluster.request("late", PROMPT))
        positions = []
        async for update in call:
            if update.WhichOneof("update") == "queued":
                positions.append(update.queued.position)
                assert "KV blocks are free" in update.queued.reason
                if len(positions) == 2:  # the second is the keep-alive
                    await cluster.prefill.run(holder, PROMPT)
            else:
                ticket = update.ticket
        assert positions[:2] == [0, 0]
        token = await cluster.prefill.run(ticket, PROMPT)
        assert [token, *await cluster.router.tokens_of("late")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_a_cancelled_reserve_leaves_the_queue() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        call = cluster.stub.Reserve(cluster.request("late", PROMPT))
        assert (await call.read()).HasField("queued")
        assert (await cluster.load()).num_requests_waiting == 2
        call.cancel()
        while (await cluster.load()).num_requests_waiting > 1:
            await asyncio.sleep(0.01)
        await cluster.prefill.run(holder, PROMPT)
        await cluster.wait_empty()


async def test_a_queued_request_meets_its_deadline() -> None:
    async with run_cluster(num_blocks=6) as cluster:
        await cluster.reserve("holder", PROMPT)
        request = cluster.request("late", PROMPT)
        request.timeout_s = 0.2
        updates = [u async for u in cluster.stub.Reserve(request)]
        assert updates[-1].rejected.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        assert "queued for KV blocks" in updates[-1].rejected.message
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="holder"))
        await cluster.wait_empty()


async def hold_nothing(cluster: DecodeCluster) -> None:
    await cluster.reserve("other", PROMPT)
    call = cluster.stub.Reserve(cluster.request("a", PROMPT))
    await call.read()


async def hold_ticket(cluster: DecodeCluster) -> None:
    await cluster.reserve("a", PROMPT)


async def hold_open_ticket(cluster: DecodeCluster) -> None:
    ticket = await cluster.reserve("a", PROMPT)
    await cluster.prefill.open(ticket)
    cluster.prefill.push(ticket, PROMPT)


async def hold_arrived(cluster: DecodeCluster) -> None:
    ticket = await cluster.reserve("a", PROMPT, max_tokens=80)
    cluster.runner.step_s = 0.02
    await cluster.prefill.run(ticket, PROMPT)
    while not cluster.router.deltas.get("a"):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "reach", [hold_nothing, hold_ticket, hold_open_ticket, hold_arrived], ids=lambda f: f.__name__
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
        if reach is not hold_nothing:
            assert (await cluster.router.end_of("a"))[
                -1
            ].error.code == common_pb2.ERROR_CODE_CANCELLED
        assert (await cluster.load()).num_quarantined_blocks == 0


async def test_a_late_write_never_reaches_the_next_owner() -> None:
    async with run_cluster(num_blocks=6, enable_prefix_caching=False) as cluster:
        cluster.prefill.answers_revoke = False
        cancelled = await cluster.reserve("a", PROMPT)
        await cluster.prefill.open(cancelled)
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        assert (await cluster.load()).num_quarantined_blocks == 3
        # Nobody gets the blocks while the writer is still at it.
        call = cluster.stub.Reserve(cluster.request("b", PROMPT[::-1]))
        assert (await call.read()).HasField("queued")
        # The writer, late: everything lands in quarantine; then it closes.
        cluster.prefill.push(cancelled, PROMPT)
        cluster.prefill.finish(cancelled, 3)
        ticket = [u async for u in call][-1].ticket
        token = await cluster.prefill.run(ticket, PROMPT[::-1])
        output = [token, *await cluster.router.tokens_of("b")]
        assert output == expected_output(PROMPT[::-1], 8)
        await cluster.wait_empty()


async def test_a_silent_writer_is_fenced_and_its_ticket_is_void() -> None:
    async with run_cluster(quarantine_timeout_s=0.3) as cluster:
        cluster.prefill.answers_revoke = False
        ticket = await cluster.reserve("a", PROMPT)
        await cluster.prefill.open(ticket)
        cluster.prefill.push(ticket, PROMPT)
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        await cluster.wait_empty()
        assert cluster.worker.registry.get_sample_value("pd_decode_fences_total") == 1
        assert cluster.prefill.revoked == [ticket.nonce]
        # It wakes up: the connection is gone, so the rest cannot land; a new handshake helps.
        cluster.prefill.finish(ticket, 3)
        while len(cluster.prefill.reports) < 2:
            await asyncio.sleep(0.01)
        await cluster.prefill.handshake(ticket.decode)
        again = await cluster.reserve("b", PROMPT)
        token = await cluster.prefill.run(again, PROMPT)
        assert [token, *await cluster.router.tokens_of("b")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()


async def test_the_kv_never_comes() -> None:
    async with run_cluster(transfer_timeout_s=0.3) as cluster:
        await cluster.reserve("a", PROMPT)
        error = (await cluster.router.end_of("a"))[-1].error
        assert error.code == common_pb2.ERROR_CODE_TRANSFER_FAILED
        assert "waiting for prefill-0 to send it" in error.message
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
        await cluster.prefill.open(ticket)
        cluster.prefill.abandon(ticket, outcome)
        assert (await cluster.router.end_of("a"))[-1].error.code == code
        await cluster.wait_empty()


async def test_a_first_token_that_ends_the_request_frees_it_silently() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        await cluster.prefill.open(ticket)
        cluster.prefill.abandon(ticket, decode_pb2.TICKET_OUTCOME_NOT_NEEDED)
        await cluster.wait_empty()
        assert "a" not in cluster.router.deltas
        # Also where it arrives all the same.
        ticket = await cluster.reserve("b", PROMPT, max_tokens=1)
        cluster.prefill.outcome = decode_pb2.TICKET_OUTCOME_SENT
        await cluster.prefill.run(ticket, PROMPT)
        await cluster.wait_empty()
        assert "b" not in cluster.router.deltas


async def test_stale_closings_and_handshakes_are_refused() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        stale = decode_pb2.TransferTicket()
        stale.CopyFrom(ticket)
        stale.nonce ^= 1
        sent = decode_pb2.TICKET_OUTCOME_SENT
        response = await cluster.prefill.close_ticket(stale, 0, sent)
        assert response.error.code == common_pb2.ERROR_CODE_STALE_TICKET
        stale.nonce, stale.decode.epoch = ticket.nonce, ticket.decode.epoch + 1
        response = await cluster.prefill.close_ticket(stale, 0, sent)
        assert response.error.code == common_pb2.ERROR_CODE_STALE_TICKET
        answer = await cluster.prefill.handshake(stale.decode)
        assert answer.error.code == common_pb2.ERROR_CODE_STALE_TICKET
        assert (await cluster.load()).num_requests_waiting == 1


async def test_unusable_logits_fail_one_request_alone() -> None:
    async with run_cluster() as cluster:
        cluster.runner.unusable.add("bad")
        other = PROMPT[::-1]
        good, bad = await cluster.reserve("good", PROMPT), await cluster.reserve("bad", other)
        await cluster.prefill.run(bad, other)
        first = await cluster.prefill.run(good, PROMPT)
        assert (await cluster.router.end_of("bad"))[-1].error.code == common_pb2.ERROR_CODE_INTERNAL
        assert [first, *await cluster.router.tokens_of("good")] == expected_output(PROMPT, 8)
        # Its KV may be what the numbers were lost in: the next request must not find it.
        again = await cluster.reserve("again", other)
        assert again.num_cached_tokens == 0
        token = await cluster.prefill.run(again, other)
        assert [token, *await cluster.router.tokens_of("again")] == expected_output(other, 8)
        await cluster.wait_empty()


async def test_a_renewal_that_ended_ends_the_worker() -> None:
    async with run_cluster() as cluster:
        main = asyncio.ensure_future(cluster.worker.main_loop())
        cluster.worker._membership._leases[0]._task.cancel()
        with pytest.raises(InternalError, match="not renewed"):
            await asyncio.wait_for(main, 10)


async def test_a_broken_step_answers_everybody_and_ends_the_worker() -> None:
    async with run_cluster() as cluster:
        cluster.runner.error = RuntimeError("the device is gone")
        waiting = await cluster.reserve("waiting", PROMPT)
        ticket = await cluster.reserve("running", PROMPT)
        main = asyncio.ensure_future(cluster.worker.main_loop())
        await cluster.prefill.run(ticket, PROMPT)
        for request_id in ("running", "waiting"):
            error = (await cluster.router.end_of(request_id))[-1].error
            assert error.code == common_pb2.ERROR_CODE_INTERNAL
            assert "the device is gone" in error.message
        with pytest.raises(Exception, match="the device is gone"):
            await asyncio.wait_for(main, 5)
        late = [u async for u in cluster.stub.Reserve(cluster.request("late", PROMPT))]
        assert late[-1].rejected.code == common_pb2.ERROR_CODE_DRAINING, "others may serve it"
        assert waiting.nonce != ticket.nonce


async def test_draining_refuses_new_requests_and_waits_for_the_rest() -> None:
    async with run_cluster() as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        drain = asyncio.ensure_future(_drain(cluster))
        await asyncio.sleep(0.05)
        updates = [u async for u in cluster.stub.Reserve(cluster.request("b", PROMPT))]
        assert updates[-1].rejected.code == common_pb2.ERROR_CODE_DRAINING
        assert not drain.done()
        await cluster.prefill.run(ticket, PROMPT)
        assert (await drain).num_requests_left == 0
        while not cluster.registry.was_draining:
            await asyncio.sleep(0.01)


async def _drain(cluster: DecodeCluster) -> decode_pb2.DecodeDrainResponse:
    response: decode_pb2.DecodeDrainResponse = await cluster.stub.Drain(
        decode_pb2.DecodeDrainRequest(), timeout=20
    )
    return response
