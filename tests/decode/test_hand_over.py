"""Hand-overs that go wrong between a real decode worker and its writers: replayed, torn, late."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kv_transfer.layout import KVDtype
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import identity
from tests.decode.cluster import EPOCH, DecodeCluster, FakePrefill, run_cluster
from tests.decode.imagined import LAYOUT, expected_output
from worker.lifecycle import DecodeStatus

pytestmark = pytest.mark.usefixtures("overlap")

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 11]
SENT = decode_pb2.TICKET_OUTCOME_SENT
FAILED = decode_pb2.TICKET_OUTCOME_FAILED


async def finish(cluster: DecodeCluster, request_id: str, prompt: list[int]) -> None:
    """One whole request, whose tokens must be right; then nothing may be held."""
    ticket = await cluster.reserve(request_id, prompt)
    token = cluster.prefill.run(ticket, prompt)
    assert [token, *await cluster.router.tokens_of(request_id)] == expected_output(prompt, 8)
    await cluster.wait_empty()


async def test_a_consumed_ticket_closed_again_changes_nothing() -> None:
    """The same closing, again and with another outcome, while its blocks are another's."""
    async with run_cluster(num_blocks=6, enable_prefix_caching=False) as cluster:
        old = await cluster.reserve("old", PROMPT)
        cluster.prefill.run(old, PROMPT)
        await cluster.router.end_of("old")
        await cluster.wait_empty()
        new = await cluster.reserve("new", PROMPT[::-1])
        assert set(new.block_ids) == set(old.block_ids)
        assert new.metadata_slot == old.metadata_slot
        assert new.nonce != old.nonce
        for outcome in (SENT, FAILED, decode_pb2.TICKET_OUTCOME_NOT_NEEDED):
            response = await cluster.prefill.close_ticket(old, 0, outcome)
            # Remembered: a retried call is no error.
            assert not response.HasField("error")
            assert not response.unknown
        token = cluster.prefill.run(new, PROMPT[::-1])
        output = [token, *await cluster.router.tokens_of("new")]
        assert output == expected_output(PROMPT[::-1], 8)
        await cluster.wait_empty()


async def test_one_part_closed_twice_does_not_free_the_other_parts_blocks() -> None:
    async with run_cluster() as cluster:
        cluster.prefill.answers_revoke = False
        ticket = await cluster.reserve("a", PROMPT)
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        for _ in range(2):
            await cluster.prefill.close_ticket(ticket, 0, decode_pb2.TICKET_OUTCOME_ABANDONED)
        assert (await cluster.load()).num_quarantined_blocks == 3
        await cluster.prefill.close_ticket(ticket, 1, decode_pb2.TICKET_OUTCOME_ABANDONED)
        assert (await cluster.load()).num_quarantined_blocks == 0
        await cluster.wait_empty()


async def test_queueing_longer_than_a_transfer_may_take_is_no_failure() -> None:
    """The clock of the transfer starts with the ticket, not with the request or its claim."""
    async with run_cluster(num_blocks=6, transfer_timeout_s=1.0) as cluster:
        holder = await cluster.reserve("holder", PROMPT)
        call = await cluster.claim("late", PROMPT[::-1])
        await cluster.wait_for(DecodeStatus.CLAIMED)
        cluster.runner.go.clear()
        cluster.prefill.run(holder, PROMPT)
        await asyncio.sleep(3 * 1.0)
        assert not call.done()
        cluster.runner.go.set()
        ticket = await cluster.prefill.ticket(call)
        assert ticket.timeout_s == pytest.approx(1.0)
        token = cluster.prefill.run(ticket, PROMPT[::-1])
        output = [token, *await cluster.router.tokens_of("late")]
        assert output == expected_output(PROMPT[::-1], 8)
        await cluster.wait_empty()


async def test_computing_longer_than_a_transfer_may_take_is_no_failure() -> None:
    """Prefill says now and then that it still computes."""
    async with run_cluster(transfer_timeout_s=2.0) as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        end = asyncio.get_running_loop().time() + 4.0
        while asyncio.get_running_loop().time() < end:
            answer = await cluster.prefill.renew(ticket.decode, ticket.nonce, 5)
            assert list(answer.unknown) == [5]
            await asyncio.sleep(0.1)
        token = cluster.prefill.run(ticket, PROMPT)
        output = [token, *await cluster.router.tokens_of("a")]
        assert output == expected_output(PROMPT, 8)
        answer = await cluster.prefill.renew(ticket.decode, ticket.nonce)
        assert list(answer.unknown) == [ticket.nonce]
        answer = await cluster.prefill.renew(identity("decode-0", EPOCH + 1), ticket.nonce)
        assert list(answer.unknown) == [ticket.nonce], "of another life"
        await cluster.wait_empty()


async def test_a_layout_mismatch_is_refused_with_both_sides_values() -> None:
    async with run_cluster() as cluster:
        cluster.prefill.layout = replace(LAYOUT, block_size=8, dtype=KVDtype.BFLOAT16)
        error = (await (await cluster.claim("a", PROMPT))).error
        assert error.code == common_pb2.ERROR_CODE_LAYOUT_MISMATCH
        assert "block_size: ours 4, theirs 8" in error.message
        assert "dtype: ours float32, theirs bfloat16" in error.message
        assert "Fix:" in error.message
        cluster.prefill.layout = LAYOUT
        await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
        await finish(cluster, "b", PROMPT)


async def test_a_claim_at_another_rank_is_refused() -> None:
    """KV for rank 1 must never reach the memory of rank 0."""
    async with run_cluster() as cluster:
        reservation = await cluster.place(cluster.request("a", PROMPT))
        cluster.prefill.stubs[1] = cluster.prefill.stubs[0]
        reservation.decode.rank = 1
        error = (await cluster.prefill.claim(reservation)).error
        assert error.code == common_pb2.ERROR_CODE_STALE_TICKET
        assert "rank 0" in error.message


async def test_a_replayed_call_never_gets_a_used_ticket() -> None:
    """However late: what was used is not known any more, and what is not known has no blocks."""
    async with run_cluster() as cluster:
        reservation = await cluster.place(cluster.request("a", PROMPT))
        ticket = await cluster.prefill.ticket(cluster.prefill.claim(reservation))
        again = await cluster.prefill.ticket(cluster.prefill.claim(reservation))
        assert again == ticket, "a repetition of the same writer, before it was used"
        token = cluster.prefill.run(ticket, PROMPT)
        assert [token, *await cluster.router.tokens_of("a")] == expected_output(PROMPT, 8)
        await cluster.wait_empty()
        error = (await cluster.prefill.claim(reservation)).error
        assert error.code == common_pb2.ERROR_CODE_STALE_TICKET
        assert (await cluster.load()).num_free_blocks == 32


async def test_an_endpoint_comes_where_the_caller_has_none_that_is_good() -> None:
    async with run_cluster(quarantine_timeout_s=0.2) as cluster:
        first, second = [await (await cluster.claim(name, PROMPT)) for name in ("a", "b")]
        assert [answer.HasField("endpoint") for answer in (first, second)] == [True, True]
        await cluster.prefill.ticket(await cluster.claim("c", PROMPT))
        known = await (await cluster.claim("d", PROMPT))
        assert not known.HasField("endpoint")
        cluster.prefill.answers_revoke = False
        for request_id in "abcd":
            await cluster.stub.Abort(decode_pb2.AbortRequest(request_id=request_id))
        await cluster.wait_empty()  # after a fence
        later = await (await cluster.claim("e", PROMPT))
        assert later.HasField("endpoint")
        assert later.endpoint.fence_generation == later.ticket.fence_generation > 0


async def test_the_fence_of_one_writer_leaves_the_tickets_of_others() -> None:
    """Another prefill worker, met only after the fence, still uses its ticket of before it."""
    async with run_cluster(quarantine_timeout_s=0.2) as cluster:
        other = FakePrefill(instance="prefill-1", epoch=9, stubs=cluster.prefill.stubs)
        try:
            request = cluster.request("b", PROMPT)
            request.prefill.CopyFrom(other.identity)
            ticket = await other.ticket(other.claim(await cluster.place(request)))
            silent = await cluster.reserve("a", PROMPT)
            cluster.prefill.answers_revoke = False
            await cluster.stub.Abort(decode_pb2.AbortRequest(request_id="a"))
            while (await cluster.load()).num_quarantined_blocks:
                await asyncio.sleep(0.01)
            token = other.run(ticket, PROMPT)
            output = [token, *await cluster.router.tokens_of("b")]
            assert output == expected_output(PROMPT, 8)
            again = await cluster.reserve("c", PROMPT)
            assert (silent.fence_generation, ticket.fence_generation) == (0, 0)
            assert again.fence_generation == cluster.prefill.num_ranks
            cluster.prefill.run(again, PROMPT)
            await cluster.router.end_of("c")
        finally:
            await asyncio.to_thread(other.stop)
        await cluster.wait_empty()


async def test_a_part_that_fails_while_another_still_sends() -> None:
    """P fails: D answers at once, and gives the blocks away only when nothing can land."""
    async with run_cluster(quarantine_timeout_s=0.3) as cluster:
        ticket = await cluster.reserve("a", PROMPT)
        cluster.prefill.open(ticket)
        cluster.prefill.push(ticket, PROMPT)
        await cluster.prefill.close_ticket(ticket, 1, FAILED, drained=False)
        error = (await cluster.router.end_of("a"))[-1].error
        assert error.code == common_pb2.ERROR_CODE_TRANSFER_FAILED
        await cluster.wait_empty()
        assert cluster.worker.registry.get_sample_value("pd_decode_fences_total") == 1
        assert cluster.worker.registry.get_sample_value("pd_kv_transfer_metadata_slots_in_use") == 0
        await finish(cluster, "b", PROMPT)
