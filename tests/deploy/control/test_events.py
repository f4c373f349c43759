"""The record of events: in memory, on disk, followed while it grows."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from deploy.control.events import MOST_EVENTS, Event, EventKind, EventLog, interrupted, read_events
from deploy.control.operation import Operation, OperationDesk, Outcome, Request, Step
from deploy.control.pool_events import PoolEvents
from deploy.plan import Role
from deploy.views.pool_watch import PoolMember


async def test_events_outlive_whoever_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = EventLog(path)
    first.add(EventKind.SCALE, "scale decode from 1 to 2", who="ada@host")
    second = EventLog(path)
    second.add(EventKind.DEATH, "decode-1 was ended by signal 9", instance="decode-1")
    texts = [(event.kind, event.who, event.instance) for event in read_events(path)]
    assert texts == [
        (EventKind.SCALE, "ada@host", ""),
        (EventKind.DEATH, "", "decode-1"),
    ]
    assert read_events(path) == second.newest()


async def test_a_line_that_is_no_event_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.add(EventKind.READY, "everything serves")
    with path.open("a") as file:
        file.write('{"half of a li\n{"kind": "unheard of", "time": 1}\n')
    assert [event.text for event in EventLog(path).newest()] == ["everything serves"]


async def test_the_file_only_grows_and_its_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [Event(time=float(n), kind=EventKind.JOINED).to_json() for n in range(MOST_EVENTS + 7)]
    path.write_text("".join(f"{line}\n" for line in lines))
    before, inode = path.read_bytes(), path.stat().st_ino
    log = EventLog(path)
    assert log.newest()[0].time == 7.0
    assert [event.time for event in log.newest(2)] == [MOST_EVENTS + 5.0, MOST_EVENTS + 6.0]
    assert log.add(EventKind.LEFT, "the last", source="ipv4:127.0.0.1:9") == ""
    assert path.read_bytes().startswith(before)
    assert path.stat().st_ino == inode
    last = read_events(path)[-1]
    assert (last.text, last.source) == ("the last", "ipv4:127.0.0.1:9")


async def test_who_runs_the_cluster_puts_the_file_away_while_it_is_written(tmp_path: Path) -> None:
    path, put_away = tmp_path / "events.jsonl", tmp_path / "events.1.jsonl"
    log = EventLog(path)
    log.add(EventKind.JOINED, "before")
    path.rename(put_away)
    log.add(EventKind.JOINED, "after")
    assert [event.text for event in read_events(put_away)] == ["before"]
    assert [event.text for event in read_events(path)] == ["after"]
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_line_that_a_full_disk_tore_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 1.0, "kind": "jo')
    EventLog(path).add(EventKind.JOINED, "whole")
    assert [event.text for event in read_events(path)] == ["whole"]


async def test_what_a_full_disk_did_not_take_is_written_with_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.add(EventKind.SCALE, "scale decode")
    with monkeypatch.context() as patch:
        patch.setattr("deploy.control.events.append_event", _no_room)
        assert log.add(EventKind.DONE, "scale decode: decode has 2")
    assert [event.text for event in interrupted(read_events(path))] == ["scale decode"]
    assert log.add(EventKind.JOINED, "decode-1") == ""
    assert [event.kind for event in read_events(path)] == ["scale", "done", "joined"]
    assert interrupted(read_events(path)) == []


def _no_room(path: Path, event: Event) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_a_failure_to_write_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    log = EventLog(folder / "events.jsonl")
    assert "events.jsonl: No such file" in log.add(EventKind.JOINED, "kept in memory alone")
    assert [event.text for event in log.newest()] == ["kept in memory alone"]
    desk = OperationDesk(log)

    async def work(_: Operation) -> str:
        return "it is done"

    request = Request(kind=EventKind.SCALE, what="scale", who="ada@host", roles=frozenset())
    told = [update async for update in desk.begin(request, work).follow()]
    assert isinstance(told[0], Step)
    assert "is not on record: " in told[0].text
    assert isinstance(told[-1], Outcome)
    assert told[-1].ok
    assert told[-1].message.startswith("it is done\nIts end is not on record: ")
    assert "No such file" in desk.note_refusal("scale", "ada@host", "", "no room")


@pytest.mark.parametrize("goes_on", [True, False])
async def test_an_operation_that_a_leaving_controller_breaks_off_has_no_end_on_record(
    tmp_path: Path, *, goes_on: bool
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    desk = OperationDesk(log)

    async def work(_: Operation) -> str:
        await asyncio.Event().wait()
        return ""

    request = Request(kind=EventKind.SCALE, what="scale", who="ada@host", roles=frozenset())
    operation = desk.begin(request, work)
    await asyncio.sleep(0)
    await desk.close(goes_on=goes_on)
    assert [event.text for event in interrupted(log.newest())] == ["scale"] * goes_on
    assert operation.outcome is not None
    assert not operation.outcome.ok
    assert ("the next one finishes this" in operation.outcome.message) == goes_on


async def test_whoever_follows_hears_the_past_and_then_the_present() -> None:
    log = EventLog()
    log.add(EventKind.JOINED, "a")
    log.add(EventKind.JOINED, "b")
    heard: list[str] = []

    async def listen() -> None:
        async for event in log.follow(1):
            heard.append(event.text)

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)
    log.add(EventKind.LEFT, "c")
    log.add(EventKind.LEFT, "d")
    async with asyncio.timeout(30):
        while len(heard) < 3:
            await asyncio.sleep(0.01)
    task.cancel()
    assert heard == ["b", "c", "d"]


def _member(epoch: int, *, draining: bool = False) -> PoolMember:
    return PoolMember(
        epoch=epoch,
        role=Role.DECODE,
        address="127.0.0.1:1",
        num_requests_running=0,
        num_requests_waiting=0,
        num_free_blocks=0,
        num_total_blocks=0,
        draining=draining,
    )


async def test_the_pool_is_told_by_instance_and_life() -> None:
    log = EventLog()
    pool = PoolEvents(log)
    two = {("decode-0", rank): _member(5) for rank in (0, 1)}
    pool.take(two)
    pool.take(two)
    pool.take({key: _member(5, draining=True) for key in two})
    pool.take({})
    pool.take({("decode-0", 0): _member(6)})
    pool.take({("decode-0", 0): _member(7)})
    told = [(event.kind, event.instance) for event in log.newest()]
    assert told == [
        (EventKind.JOINED, "decode-0"),
        (EventKind.DRAINING, "decode-0"),
        (EventKind.LEFT, "decode-0"),
        (EventKind.JOINED, "decode-0"),
        (EventKind.JOINED, "decode-0"),
    ]
