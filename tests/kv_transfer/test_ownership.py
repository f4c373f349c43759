"""Quarantine: blocks come out exactly once, and only when nobody can write them any more."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.ownership import Quarantine, Released

WRITERS = ("prefill-0", "prefill-1")


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class QuarantineMachine(RuleBasedStateMachine):
    """Random calls against a model: per nonce the parts that are open, and whether a fence covers
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.quarantine = Quarantine(self.clock, timeout_s=30.0, max_blocks=20)
        self.open_parts: dict[int, set[int]] = {}
        self.writer_of: dict[int, str] = {}
        self.block_ids: dict[int, tuple[int, ...]] = {}
        self.next_block = 1
        self.next_nonce = 1

    @rule(
        num_blocks=st.integers(0, 5), parts=st.sets(st.integers(0, 7), min_size=1), data=st.data()
    )
    def add(self, num_blocks: int, parts: set[int], data: st.DataObject) -> None:
        nonce = self.next_nonce
        self.next_nonce += 1
        blocks = tuple(range(self.next_block, self.next_block + num_blocks))
        self.next_block += num_blocks
        self.writer_of[nonce] = data.draw(st.sampled_from(WRITERS))
        self.open_parts[nonce] = set(parts)
        self.block_ids[nonce] = blocks
        self.quarantine.add(
            f"r{nonce}",
            nonce,
            block_ids=blocks,
            slot=nonce,
            writer=self.writer_of[nonce],
            open_parts=parts,
        )

    @rule(nonce=st.integers(1, 30), part=st.integers(0, 7))
    def close_part(self, nonce: int, part: int) -> None:
        released = self.quarantine.close_part(nonce, part)
        if nonce not in self.open_parts:
            assert released is None
            return
        self.open_parts[nonce].discard(part)
        assert (released is not None) == (not self.open_parts[nonce])
        if released is not None:
            self.check_out(released)

    @rule(nonce=st.integers(1, 30))
    def drained(self, nonce: int) -> None:
        released = self.quarantine.drained(nonce)
        assert (released is not None) == (nonce in self.open_parts)
        if released is not None:
            self.check_out(released)

    @rule(seconds=st.floats(0.0, 40.0))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.open_parts)
    @rule(writer=st.sampled_from(WRITERS))
    def fence(self, writer: str) -> None:
        nonces = self.quarantine.nonces_of(writer)
        assert set(nonces) == {n for n in self.open_parts if self.writer_of[n] == writer}
        released = self.quarantine.release_fenced(nonces)
        assert [r.nonce for r in released] == list(nonces)
        assert self.quarantine.release_fenced(nonces) == []
        for one in released:
            self.check_out(one)

    def check_out(self, released: Released) -> None:
        assert released.block_ids == self.block_ids.pop(released.nonce)
        assert released.slot == released.nonce
        del self.open_parts[released.nonce]

    @invariant()
    def counts_agree(self) -> None:
        self.quarantine.check_integrity()
        assert self.quarantine.num_entries == len(self.open_parts)
        assert self.quarantine.num_blocks == sum(map(len, self.block_ids.values()))

    @invariant()
    def what_is_not_due_is_young_and_fits(self) -> None:
        due = {entry.nonce for entry in self.quarantine.due_for_fence()}
        rest = [n for n in self.open_parts if n not in due]
        assert sum(len(self.block_ids[n]) for n in rest) <= 20
        assert self.quarantine.num_entries == len(due) + len(rest)


TestQuarantineMachine = QuarantineMachine.TestCase


def add(quarantine: Quarantine, nonce: int, num_blocks: int = 2) -> None:
    quarantine.add(
        "r", nonce, block_ids=range(num_blocks), slot=0, writer="prefill-0", open_parts=[0]
    )


def test_due_after_the_timeout() -> None:
    clock = Clock()
    quarantine = Quarantine(clock, timeout_s=30.0, max_blocks=100)
    add(quarantine, 1)
    clock.now += 29.0
    add(quarantine, 2)
    assert quarantine.due_for_fence() == []
    clock.now += 1.0
    assert [entry.nonce for entry in quarantine.due_for_fence()] == [1]
    assert quarantine.oldest_s == 30.0


def test_the_oldest_are_due_at_once_when_there_are_too_many_blocks() -> None:
    quarantine = Quarantine(Clock(), timeout_s=30.0, max_blocks=3)
    for nonce in (1, 2, 3):
        add(quarantine, nonce)
    assert [entry.nonce for entry in quarantine.due_for_fence()] == [1, 2]


def test_a_writer_gets_time_to_answer_however_many_blocks_wait() -> None:
    clock = Clock()
    quarantine = Quarantine(clock, timeout_s=30.0, max_blocks=3, patience_s=5.0)
    add(quarantine, 1)
    clock.now += 2.0
    add(quarantine, 2)
    add(quarantine, 3)
    assert quarantine.due_for_fence() == []
    clock.now += 3.0
    assert [entry.nonce for entry in quarantine.due_for_fence()] == [1]
    clock.now += 2.0
    assert [entry.nonce for entry in quarantine.due_for_fence()] == [1, 2]


def test_misuse_is_refused() -> None:
    quarantine = Quarantine(Clock(), timeout_s=30.0, max_blocks=3)
    with pytest.raises(ValueError, match="no part is open"):
        quarantine.add("r", 1, block_ids=[1], slot=0, writer="prefill-0", open_parts=[])
    add(quarantine, 1)
    with pytest.raises(ValueError, match="in quarantine already"):
        add(quarantine, 1)
