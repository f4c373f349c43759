"""A rank has one stream for each use, made when it is wanted, and all of them end together."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.streams import PRIORITY, Streams, StreamUse

DEVICE = torch.device("cuda", 3)


@dataclass(eq=False)
class FakeStream:
    device: torch.device
    priority: int
    waits: list[FakeStream]

    def synchronize(self) -> None:
        self.waits.append(self)


@dataclass
class Maker:
    made: list[FakeStream] = field(default_factory=list)
    waits: list[FakeStream] = field(default_factory=list)

    def make(self, device: torch.device, priority: int) -> FakeStream:
        self.made.append(FakeStream(device, priority, self.waits))
        return self.made[-1]


@given(st.lists(st.sampled_from(StreamUse)))
def test_a_use_has_one_stream_from_its_first_use_on(uses: list[StreamUse]) -> None:
    maker = Maker()
    streams = Streams(DEVICE, make=maker.make)
    found = {use: streams.of(use) for use in uses}
    assert all(streams.of(use) is found[use] for use in uses)
    assert streams.uses == tuple(found)
    assert maker.made == list(found.values()), "no other one, and of no two uses the same"
    assert all((made.device, made.priority) == (DEVICE, PRIORITY) for made in maker.made)
    streams.close()
    assert sorted(map(id, maker.waits)) == sorted(map(id, maker.made)), "each is waited for once"
    assert streams.uses == ()
    streams.close()
    assert len(maker.waits) == len(maker.made)


def test_where_nobody_asks_no_device_is_touched() -> None:
    streams = Streams(torch.device("cpu"))
    assert streams.uses == ()
    streams.close()


def test_a_failed_device_keeps_no_stream_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeStream):
        def synchronize(self) -> None:
            self.waits.append(self)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    waits: list[FakeStream] = []
    streams = Streams(DEVICE, make=lambda device, priority: Failing(device, priority, waits))
    for use in StreamUse:
        streams.of(use)
    streams.close()
    assert len(waits) == len(StreamUse)
    assert streams.uses == ()
    for use in StreamUse:
        assert f"use={use}" in caplog.text
    assert "illegal memory access" in caplog.text
