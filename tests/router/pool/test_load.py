"""Loads are merged once: our requests are exact, those of others are as of the last report."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.pool.load import MergedLoad
from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import PoolView

TOKENS = 1000


def member(instance: str = "prefill-0", load: WorkerLoad | None = None) -> Member:
    return Member(
        key=WorkerKey(instance, 1, 0),
        role=Role.PREFILL,
        address="127.0.0.1:1",
        num_ranks=1,
        model="m",
        max_model_len=100,
        layout_fingerprint="l",
        transport="loopback",
        load=load or WorkerLoad(),
    )


class LoadMachine(RuleBasedStateMachine):
    """One worker, its requests of ours and of others, and reports that take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PoolView(lambda: 0.0)
        self.renewed, self.beside = member(), member("prefill-1")
        self.pool.update([self.renewed, self.beside])
        self.ours: list[ExitStack] = []
        self.num_at_worker = 0
        """Of ours: the worker hears of them later than we, and is rid of them earlier."""
        self.others = 0
        self.num_reports = 0
        self.on_their_way: list[tuple[WorkerLoad, int]] = []
        """With what others had when the report was made."""
        self.told_others = (0, 0)
        """(sequence, others) of the newest report that arrived."""

    @rule()
    def send(self) -> None:
        self.ours.append(ExitStack())
        self.ours[-1].enter_context(self.pool.in_flight(member().key, TOKENS))

    @precondition(lambda self: self.num_at_worker < len(self.ours))
    @rule()
    def arrive(self) -> None:
        self.num_at_worker += 1

    @precondition(lambda self: self.num_at_worker)
    @rule()
    def end_at_worker(self) -> None:
        self.num_at_worker -= 1

    @precondition(lambda self: self.num_at_worker < len(self.ours))
    @rule()
    def end(self) -> None:
        self.ours.pop().close()

    @rule(others=st.integers(0, 5))
    def others_come_and_go(self, others: int) -> None:
        self.others = others

    @precondition(lambda self: len(self.on_their_way) < 2)
    @rule()
    def make_report(self) -> None:
        self.num_reports += 1
        number = self.num_at_worker + self.others
        load = WorkerLoad(
            num_requests_running=number,
            num_tokens_waiting=TOKENS * number,
            sequence=self.num_reports,
        )
        self.on_their_way.append((load, self.others))

    @precondition(lambda self: self.on_their_way)
    @rule(position=st.integers(0, 1), as_renewal=st.booleans())
    def deliver(self, position: int, as_renewal: bool) -> None:
        load, others = self.on_their_way.pop(min(position, len(self.on_their_way) - 1))
        self.told_others = max(self.told_others, (load.sequence, others))
        if as_renewal:
            self.renewed = replace(self.renewed, load=load)
            self.pool.update([self.renewed, self.beside])
        else:
            self.pool.report(self.renewed.key, load)

    @rule(is_other_process=st.booleans())
    def another_member_renews(self, is_other_process: bool) -> None:
        """Everybody's last renewal is announced again."""
        self.beside = replace(self.beside, load=WorkerLoad(num_requests_running=self.num_reports))
        if is_other_process:  # there every announcement is made of new objects
            self.renewed = replace(self.renewed)
        self.pool.update([self.renewed, self.beside])

    @invariant()
    def ours_are_never_counted_twice(self) -> None:
        (candidate, _) = self.pool.candidates(Role.PREFILL)
        others = candidate.num_requests - len(self.ours)
        assert 0 <= others <= self.told_others[1]
        assert candidate.num_tokens == TOKENS * candidate.num_requests

    def teardown(self) -> None:
        for request in self.ours:
            request.close()
        self.on_their_way.clear()
        self.ours, self.num_at_worker = [], 0
        for others in (3, 3, 3, 0):
            self.others = others
            self.make_report()
            self.deliver(0, as_renewal=False)
            (candidate, _) = self.pool.candidates(Role.PREFILL)
            assert candidate.num_requests <= others
        assert (candidate.num_requests, candidate.num_tokens) == (0, 0)


LoadMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestLoadMachine = LoadMachine.TestCase


def test_the_announcement_of_another_member_brings_back_no_load() -> None:
    pool = PoolView(lambda: 0.0)
    one, other = member(), member("prefill-1")
    pool.update([one, other])
    with ExitStack() as requests:
        for _ in range(8):
            requests.enter_context(pool.in_flight(one.key, 4000))
        full = WorkerLoad(num_requests_running=8, num_tokens_waiting=32000, sequence=1)
        one = replace(one, load=full)
        pool.update([one, other])
    for sequence in range(1, 4):
        other = replace(other, load=WorkerLoad(num_free_blocks=sequence, sequence=sequence))
        pool.update([replace(one), other])
        loads = {c.member.key: c.num_requests for c in pool.candidates(Role.PREFILL)}
        assert loads == {one.key: 0, other.key: 0}


def test_what_others_have_is_seen() -> None:
    load = MergedLoad()
    load.enter(10)
    assert load.apply(WorkerLoad(num_requests_running=5, num_tokens_waiting=100, sequence=3))
    assert (load.num_requests, load.num_tokens) == (5, 100)
    assert not load.apply(WorkerLoad(num_requests_running=9, sequence=2))
    assert not load.apply(WorkerLoad(num_requests_running=9, sequence=3))
    load.leave(10)
    assert (load.num_requests, load.num_tokens) == (4, 90)
    assert load.apply(WorkerLoad(num_requests_running=1))  # frames of an older worker say no number
    assert not load.apply(WorkerLoad(num_requests_running=9, sequence=3))
    assert load.report.num_requests_running == 1
