"""The garbage collector has nothing to look through that is there for good."""

from __future__ import annotations

import gc

import pytest

from router.__main__ import YOUNG_OBJECTS
from runtime.garbage import set_aside


@pytest.fixture
def usual_collections():
    thresholds = gc.get_threshold()
    gc.unfreeze()  # what the collection of tests has imported
    yield
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
