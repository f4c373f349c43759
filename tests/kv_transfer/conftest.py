"""Sides that are closed after each test, and the check that no thread outlives them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.kv_transfer.helpers import DecodeSide, PrefillSide
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.fixture
def decode(_no_thread_left: None) -> Iterator[DecodeSide]:
    side = DecodeSide()
    yield side
    side.close()


@pytest.fixture
def make_prefill(_no_thread_left: None) -> Iterator[Callable[..., PrefillSide]]:
    sides: list[PrefillSide] = []

    def make(**kwargs: object) -> PrefillSide:
        sides.append(PrefillSide(**kwargs))  # type: ignore[arg-type]
        return sides[-1]

    yield make
    for side in sides:
        side.close()
