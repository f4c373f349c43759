"""Blocks of a ticket come back exactly once, and never while a writer may still write."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.requests import DecodeRequest, TicketUpdate
from decode.tickets import TicketDesk, WriterDemand
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from kv_transfer.ownership import Quarantine
from runtime.errors import OutOfBlocksError, OverloadedError
from tests.decode.helpers import BLOCK_SIZE, WRITER, FakeClock, make_request


class Tokens(list[int]):
    """A list that can be watched."""


class FakeSlots:
    """Slots without memory; freeing one twice is an error."""

    def __init__(self, count: int) -> None:
        self.free_slots = set(range(count))

    @property
    def num_free(self) -> int:
        return len(self.free_slots)

    def free(self, slot: int) -> None:
        assert slot not in self.free_slots
        self.free_slots.add(slot)


class FakeReceiver:
    """Remembers who is awaited."""

    def __init__(self, slots: FakeSlots) -> None:
        self.slots = slots
        self.awaited: dict[str, int] = {}
        self.num_parts = WRITER.num_ranks

    def expect(self, request_id: str, nonce: int, num_parts: int) -> int:
        if not self.slots.free_slots:
            raise OverloadedError("no slot")
        assert request_id not in self.awaited
        assert num_parts == self.num_parts
        self.awaited[request_id] = nonce
        return self.slots.free_slots.pop()

    def forget(self, request_id: str) -> bool:
        return self.awaited.pop(request_id, None) is not None


class Bench:
    def __init__(self, num_usable: int = 12, num_slots: int = 4) -> None:
        self.clock = FakeClock()
        self.pool = BlockPool(num_usable + 1, BLOCK_SIZE)
        self.slots = FakeSlots(num_slots)
        self.receiver = FakeReceiver(self.slots)
        self.generation = 0
        self.desk = TicketDesk(
            self.pool,
            self.slots,
            self.receiver,
            Quarantine(self.clock, timeout_s=30.0, max_blocks=num_usable),
            fence_generation=lambda writer: self.generation,
        )
        self.serials: Iterator[int] = itertools.count()

    def open(self, num_prompt: int = 9) -> tuple[DecodeRequest, TicketUpdate]:
        request = make_request(next(self.serials), num_prompt)
        return request, self.desk.open(request, 60.0)

    def arrive(self, nonce: int) -> DecodeRequest | None:
        """The receiver delivers an allocation, and awaits it no more."""
        self.receiver.awaited = {k: v for k, v in self.receiver.awaited.items() if v != nonce}
        return self.desk.arrive(nonce)

    @property
    def num_held(self) -> int:
        return self.pool.num_usable_blocks - self.pool.num_free_blocks


def test_a_ticket_covers_the_prompt_and_the_request_gets_room_for_one_more() -> None:
    bench = Bench()
    request, ticket = bench.open(8)  # two whole blocks: the next token needs a third
    assert len(ticket.block_ids) == 2
    assert len(request.request.block_table) == 3
    assert ticket.num_cached_tokens == 0
    assert ticket.nonce == 101


def test_a_cached_prefix_is_shared_and_the_last_token_is_not() -> None:
    bench = Bench()
    request, ticket = bench.open(8)
    assert bench.arrive(ticket.nonce) is request
    bench.pool.commit(request.request.block_table[:2], request.request.block_hashes[:2])
    twin = make_request(0, 8)
    assert bench.desk.num_blocks_to_take(twin) == 2
    again = bench.desk.open(twin, 60.0)
    assert again.num_cached_tokens == 4  # the second block has the last token
    assert twin.request.block_table[0] == request.request.block_table[0]
    assert len(again.block_ids) == 1


def test_parts_are_counted_from_the_first_rank_of_the_writer() -> None:
    bench = Bench()
    request = make_request(0, 9)
    request.writer = replace(WRITER, rank=3)
    ticket = bench.desk.open(request, 60.0)
    writer = bench.desk.writer_of(ticket.nonce)
    assert writer is not None
    assert [rank for rank in range(7) if writer.has_rank(rank)] == [3, 4]
    for rank in (3, 4):
        assert bench.desk.close_part(ticket.nonce, rank, drained=True) is not None
    assert bench.desk.cancel(request) is WriterDemand.NOTHING
    assert bench.num_held == 0


def test_ranks_that_write_alone_are_writers_of_their_own() -> None:
    bench = Bench()
    bench.receiver.num_parts = 1
    tickets = []
    for rank in range(2):
        request = make_request(rank, 9)
        request.writer = replace(WRITER, rank=rank, num_ranks=1)
        tickets.append(bench.desk.open(request, 60.0))
    first = replace(WRITER, rank=0, num_ranks=1)
    assert bench.desk.nonces_of(first) == (tickets[0].nonce,)
    assert (first.key, first.peers) == ("prefill-0@0000000000000007/0", [first.key])
    assert len(WRITER.peers) == 2


def test_failed_openings_leave_nothing_behind() -> None:
    bench = Bench(num_usable=4, num_slots=1)
    with pytest.raises(OutOfBlocksError):
        bench.open(40)
    bench.open(4)
    with pytest.raises(OverloadedError):
        bench.open(4)
    assert bench.num_held == 2
    bench.desk.check_integrity()


def test_arrival_frees_the_slot_and_later_closings_are_known() -> None:
    bench = Bench()
    request, ticket = bench.open()
    assert bench.arrive(ticket.nonce) is request
    assert bench.slots.num_free == 4
    assert bench.arrive(ticket.nonce) is None  # once
    assert bench.desk.writer_of(ticket.nonce) == WRITER
    for part in (0, 1, 1):
        assert bench.desk.close_part(ticket.nonce, part, drained=True) is None
    assert bench.desk.writer_of(999) is None


def test_a_settled_ticket_keeps_nothing_of_its_request() -> None:
    """A thousand prompts of a hundred thousand tokens would be gigabytes."""
    bench = Bench()
    request, ticket = bench.open()
    assert bench.arrive(ticket.nonce) is request
    bench.pool.release(request.request.block_table)
    prompt = Tokens(request.request.prompt_token_ids)
    request.request.prompt_token_ids = prompt
    alive = weakref.ref(prompt)
    del request, prompt
    gc.collect()
    assert alive() is None
    assert bench.desk.writer_of(ticket.nonce) == WRITER


@pytest.mark.parametrize(("salt", "num_cached"), [("alice\0", 4), ("bob\0", 0), ("", 0)])
def test_a_cached_prefix_is_shared_by_requests_of_one_salt_only(salt: str, num_cached: int) -> None:
    bench, request = Bench(), make_request(0, 8)
    request.request.cache_salt = "alice\0"
    ticket = bench.desk.open(request, 60.0)
    assert bench.arrive(ticket.nonce) is request
    bench.pool.commit(request.request.block_table[:2], request.request.block_hashes[:2])
    twin = make_request(0, 8)
    twin.request.cache_salt = salt
    assert bench.desk.open(twin, 60.0).num_cached_tokens == num_cached


def test_a_context_that_ends_in_output_is_received_as_a_whole() -> None:
    bench = Bench()
    request = make_request(0, 5, num_output=4)
    ticket = bench.desk.open(request, 60.0)
    assert request.request.num_context_tokens == 9
    assert len(ticket.block_ids) == 3
    assert bench.arrive(ticket.nonce) is request
    bench.pool.commit(request.request.block_table[:2], request.request.block_hashes[:2])
    # The same tokens as a prompt, or with another share of output, are the same KV.
    twin = make_request(0, 5, num_output=4)
    twin.request.request_id, twin.nonce = "twin", 7
    assert bench.desk.num_blocks_to_take(twin) == 1
    assert bench.desk.open(twin, 60.0).num_cached_tokens == 8


def test_cancel_keeps_what_the_writer_had_until_all_parts_close() -> None:
    bench = Bench()
    request, ticket = bench.open(8)
    assert bench.desk.cancel(request) is WriterDemand.REVOKE
    assert bench.num_held == 2  # the room beyond the prompt is free
    assert request.request.block_table == []
    assert bench.receiver.awaited == {}
    bench.desk.close_part(ticket.nonce, 0, drained=True)
    bench.desk.close_part(ticket.nonce, 0, drained=True)
    assert bench.num_held == 2
    bench.desk.close_part(ticket.nonce, 1, drained=True)
    assert bench.num_held == 0
    assert bench.slots.num_free == 4


def test_cancel_after_all_parts_closed_frees_at_once() -> None:
    bench = Bench()
    request, ticket = bench.open()
    for part in range(2):
        bench.desk.close_part(ticket.nonce, part, drained=True)
    assert bench.desk.cancel(request) is WriterDemand.NOTHING
    assert bench.num_held == 0


def test_an_arrival_that_crosses_the_cancel_frees_the_blocks() -> None:
    bench = Bench()
    request, ticket = bench.open()
    bench.desk.cancel(request)
    assert bench.arrive(ticket.nonce) is None
    assert bench.num_held == 0


def test_an_undrained_part_is_believed_by_nobody_but_the_fence() -> None:
    bench = Bench()
    request, ticket = bench.open()
    bench.desk.close_part(ticket.nonce, 0, drained=False)
    bench.desk.close_part(ticket.nonce, 1, drained=True)
    assert bench.desk.cancel(request) is WriterDemand.FENCE
    bench.desk.close_part(ticket.nonce, 0, drained=True)
    bench.desk.drained(ticket.nonce)
    assert bench.num_held == 3
    bench.desk.fenced(bench.desk.nonces_of(WRITER))
    assert bench.num_held == 0


def test_a_fence_settles_tickets_of_before_and_none_of_after() -> None:
    bench = Bench()
    cancelled, _ = bench.open(4)
    waiting, _ = bench.open(4)
    bench.desk.cancel(cancelled)
    nonces = bench.desk.nonces_of(WRITER)
    after, _ = bench.open(4)  # while the fence runs
    bench.desk.fenced(nonces)
    assert bench.num_held == 4
    # The one that waited is over without asking anybody; the later one is not.
    assert bench.desk.cancel(waiting) is WriterDemand.NOTHING
    assert bench.desk.cancel(after) is WriterDemand.REVOKE
    assert bench.desk.num_quarantined_blocks == 1


def test_impatience_names_the_writer() -> None:
    bench = Bench()
    request, ticket = bench.open()
    bench.desk.cancel(request)
    assert bench.desk.due_for_fence() == set()
    assert bench.desk.needs_fence(ticket.nonce)
    bench.clock.now += 30.0
    assert bench.desk.due_for_fence() == {WRITER}


class TicketMachine(RuleBasedStateMachine):
    """Any order of arrivals, closings, cancels, revocations and fences conserves blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_usable=20, num_slots=5)
        self.open_tickets: dict[int, DecodeRequest] = {}
        self.nonces: list[int] = []
        self.written: dict[int, tuple[int, ...]] = {}
        self.closed: dict[int, set[int]] = {}
        self.running: list[DecodeRequest] = []

    @rule(num_prompt=st.integers(1, 20))
    def open(self, num_prompt: int) -> None:
        desk = self.bench.desk
        request = make_request(next(self.bench.serials), num_prompt)
        blocks = desk.num_blocks_to_take(request)
        if not desk.has_free_slot or not self.bench.pool.can_allocate(blocks):
            return
        update = desk.open(request, 1.0)
        for other in self.written.values():
            assert not set(other) & set(update.block_ids), "given away while it may be written"
        self.open_tickets[update.nonce] = request
        self.written[update.nonce] = update.block_ids
        self.closed[update.nonce] = set()
        self.nonces.append(update.nonce)

    @precondition(lambda self: self.nonces)
    @rule(data=st.data(), part=st.integers(0, 1))
    def close_part(self, data: st.DataObject, part: int) -> None:
        nonce = data.draw(st.sampled_from(self.nonces))
        self.bench.desk.close_part(nonce, part, drained=True)
        self.closed[nonce].add(part)
        if len(self.closed[nonce]) == 2 and nonce not in self.open_tickets:
            self.written.pop(nonce, None)

    @precondition(lambda self: self.open_tickets)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        nonce = data.draw(st.sampled_from(sorted(self.open_tickets)))
        request = self.open_tickets.pop(nonce)
        assert self.bench.arrive(nonce) is request
        self.written.pop(nonce)
        self.running.append(request)

    @precondition(lambda self: self.open_tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        nonce = data.draw(st.sampled_from(sorted(self.open_tickets)))
        demand = self.bench.desk.cancel(self.open_tickets.pop(nonce))
        assert (demand is WriterDemand.NOTHING) == (not self.bench.desk.needs_fence(nonce))
        if demand is WriterDemand.NOTHING:
            self.written.pop(nonce)

    @precondition(lambda self: self.nonces)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        nonce = data.draw(st.sampled_from(self.nonces))
        if nonce not in self.open_tickets:
            self.bench.desk.drained(nonce)
            self.written.pop(nonce, None)

    @rule()
    def fence(self) -> None:
        self.bench.desk.fenced(self.bench.desk.nonces_of(WRITER))
        self.written = {n: b for n, b in self.written.items() if n in self.open_tickets}

    @precondition(lambda self: self.running)
    @rule()
    def finish(self) -> None:
        self.bench.pool.release(self.running.pop(0).request.block_table)

    @invariant()
    def books_agree(self) -> None:
        bench = self.bench
        bench.pool.check_integrity()
        bench.desk.check_integrity()
        live = [*self.open_tickets.values(), *self.running]
        held = sum(num_blocks_for(item.request.num_prompt_tokens + 1, BLOCK_SIZE) for item in live)
        assert bench.num_held == held + bench.desk.num_quarantined_blocks
        assert bench.slots.num_free == 5 - bench.desk.num_open - bench.desk.num_quarantined


TicketMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTicketMachine = TicketMachine.TestCase
