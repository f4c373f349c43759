"""The garbage collector has nothing to look through that is there for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from router.__main__ import YOUNG_OBJECTS
from runtime.garbage import LONG_PAUSE_S, CollectorPauses, forget_frames, set_aside, take_back
from tests.prefill.fakes import Clock


class Cycle:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def usual_collections() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.unfreeze()  # what the collection of tests has imported
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("usual_collections")
def test_what_a_router_starts_with_is_never_looked_through_again() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert gc.is_tracked(cycle)
    assert gc.get_freeze_count() == 0
    set_aside(young_objects=YOUNG_OBJECTS)
    assert gc.get_freeze_count() > 1000
    assert not any(each is cycle for each in gc.get_objects())
    assert gc.get_threshold()[0] > 10_000


@pytest.mark.usefixtures("usual_collections")
def test_what_is_taken_back_is_freed_when_nobody_has_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    young_objects = gc.get_threshold()[0]
    gc.disable()
    before, kept = weakref.ref(Cycle()), Cycle()
    gc.enable()
    set_aside()
    assert before() is None, "what nobody had by then"
    assert "set aside from the garbage collector objects=" in caplog.text
    assert gc.get_threshold()[0] == young_objects
    ref = weakref.ref(kept)
    del kept
    gc.collect()
    assert ref() is not None
    take_back()
    gc.collect()
    assert ref() is None
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("usual_collections")
def test_an_error_that_was_dealt_with_holds_no_frames() -> None:
    held: list[weakref.ref[Cycle]] = []

    def fail() -> None:
        local = Cycle()
        local.itself = None
        held.append(weakref.ref(local))
        raise ValueError("the first")

    def deal() -> None:
        try:
            try:
                fail()
            except ValueError as first:
                raise KeyError("the second") from first
        except KeyError as second:
            kept = second
        assert held[-1]() is not None
        forget_frames(kept)
        assert held[-1]() is None
        assert isinstance(kept.__cause__, ValueError)

    gc.disable()
    try:
        deal()
    finally:
        gc.enable()


def test_long_collections_are_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    pauses = CollectorPauses(clock)

    def be_slow(phase: str, info: dict[str, int]) -> None:
        clock.now += pause_s * (phase == "start")

    with pauses.watched():
        gc.callbacks.append(be_slow)  # behind it, so in the middle of what it times
        try:
            pause_s = LONG_PAUSE_S / 2
            gc.collect()
            assert pauses.num_long == 0
            pause_s = 3 * LONG_PAUSE_S
            gc.collect()
            pause_s = 2 * LONG_PAUSE_S
            gc.collect()
        finally:
            gc.callbacks.remove(be_slow)
        assert pauses.num_long == 2
    assert not caplog.text, "perhaps under a lock of the log's"
    pauses.tell()
    pauses.tell()
    (record,) = caplog.records
    assert record.getMessage() == "stood still to collect garbage count=2 longest_ms=30"
    before = list(gc.callbacks)
    with pauses.watched():
        assert len(gc.callbacks) == len(before) + 1
    assert gc.callbacks == before
