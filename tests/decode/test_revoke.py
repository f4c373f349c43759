"""Blocks of cancelled tickets come back: by asking, else by fencing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from decode.live import WriterOrder
from decode.requests import Writer
from decode.revoke import Revoker
from decode.tickets import WriterDemand
from kv_transfer.transport import peer_name
from runtime.errors import PeerLostError
from runtime.pb import prefill_pb2
from runtime.rpc.wire import identity
from tests.decode.helpers import WRITER


class FakeBooks:
    """Tickets by nonce; remembers what it was told."""

    def __init__(self, *nonces: int) -> None:
        self.quarantined = set(nonces)
        self.drained_nonces: list[int] = []
        self.num_fences = 0
        self.due: set[Writer] = set()

    async def drained(self, nonce: int) -> None:
        self.quarantined.discard(nonce)
        self.drained_nonces.append(nonce)

    async def needs_fence(self, nonce: int) -> bool:
        return nonce in self.quarantined

    async def nonces_of(self, writer: Writer) -> Sequence[int]:
        return tuple(self.quarantined)

    async def fenced(self, nonces: Sequence[int]) -> None:
        self.num_fences += 1
        self.quarantined -= set(nonces)
        self.due = set()

    async def due_for_fence(self) -> set[Writer]:
        return self.due


class Bench:
    def __init__(self, *nonces: int, answer: bool | Exception = True) -> None:
        self.books = FakeBooks(*nonces)
        self.answer = answer
        self.requests: list[prefill_pb2.RevokeRequest] = []
        self.fenced: list[str] = []
        self.revoker = Revoker(
            self.books,
            self._call,
            self._fence,
            decode=identity("decode-0", 3, 1),
            ticket_timeout_s=60.0,
            quarantine_timeout_s=30.0,
        )

    async def _call(
        self, address: str, request: prefill_pb2.RevokeRequest, timeout_s: float
    ) -> bool:
        assert (address, timeout_s) == (WRITER.address, 30.0)
        self.requests.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _fence(self, writer: str, peer: str) -> None:
        assert writer in EVERY_RANK
        assert threading.current_thread() is not threading.main_thread()
        self.fenced.append(peer)

    def order(self, nonce: int, demand: WriterDemand = WriterDemand.REVOKE) -> None:
        self.revoker.order(
            WriterOrder(request_id=f"r{nonce}", nonce=nonce, writer=WRITER, demand=demand)
        )

    async def settle(self) -> None:
        async with asyncio.timeout(60):
            while self.revoker.num_pending:
                await asyncio.sleep(0.005)
        await self.revoker.close()


EVERY_RANK = [peer_name("prefill-0", 7, rank) for rank in range(2)]


async def test_asking_is_enough() -> None:
    bench = Bench(11)
    bench.order(11)
    await bench.settle()
    (request,) = bench.requests
    assert (request.nonce, request.request_id) == (11, "r11")
    assert (request.prefill.instance, request.prefill.epoch) == ("prefill-0", 7)
    assert (request.decode.instance, request.decode.rank) == ("decode-0", 1)
    assert request.remember_s > 60.0
    assert bench.books.drained_nonces == [11]
    assert bench.fenced == []


@pytest.mark.parametrize("answer", [False, PeerLostError("connection refused")])
async def test_no_good_answer_shuts_every_rank_out(answer: bool | Exception) -> None:
    bench = Bench(11, 12, answer=answer)
    bench.order(11)
    bench.order(12)
    await bench.settle()
    # One fence serves both.
    assert bench.fenced == EVERY_RANK
    assert bench.books.num_fences == 1
    assert bench.books.drained_nonces == []


async def test_a_writer_that_does_not_know_itself_is_not_asked() -> None:
    bench = Bench(11)
    bench.order(11, WriterDemand.FENCE)
    await bench.settle()
    assert bench.requests == []
    assert bench.fenced == EVERY_RANK


async def test_a_data_parallel_rank_is_asked_and_shut_out_alone() -> None:
    bench = Bench(11, answer=False)
    writer = replace(WRITER, rank=1, num_ranks=1)
    demand = WriterDemand.REVOKE
    bench.revoker.order(WriterOrder(request_id="r", nonce=11, writer=writer, demand=demand))
    await bench.settle()
    (request,) = bench.requests
    assert request.prefill.rank == 1
    assert bench.fenced == EVERY_RANK[1:]


async def test_what_is_free_already_needs_no_fence() -> None:
    bench = Bench(answer=False)
    bench.order(11)
    await bench.settle()
    assert bench.fenced == []


async def test_the_sweep_fences_who_is_due() -> None:
    bench = Bench(11)
    await bench.revoker.sweep()
    assert bench.revoker.num_pending == 0
    bench.books.due = {WRITER}
    await bench.revoker.sweep()
    await bench.revoker.sweep()
    await bench.settle()
    assert bench.fenced == EVERY_RANK


async def test_a_writer_that_cannot_be_shut_out_is_tried_by_one_task_at_a_time() -> None:
    bench = Bench(7)
    release = threading.Event()
    is_tried = threading.Event()

    def hang(writer: str, peer: str) -> None:
        is_tried.set()
        release.wait(60)
        raise PeerLostError("still there")

    revoker = Revoker(
        bench.books,
        bench._call,
        hang,
        decode=identity("decode-0", 3, 1),
        ticket_timeout_s=60.0,
        quarantine_timeout_s=30.0,
    )
    bench.books.due = {WRITER}
    await revoker.sweep()
    assert await asyncio.to_thread(is_tried.wait, 60)
    for _ in range(20):
        await revoker.sweep()
    assert revoker.num_pending == 1
    release.set()
    while revoker.num_pending:
        await asyncio.sleep(0.01)
    assert 7 in bench.books.quarantined
    await revoker.sweep()
    assert revoker.num_pending == 1
    await revoker.close()
