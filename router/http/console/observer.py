"""Puts together what this process knows with what the others know: parts, points, snapshots."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from router.http.app import missing_parts, worker_state
from router.http.console.finished import WINDOW_S, median_of
from router.http.console.history import NUM_POINTS, STEP_S, History, HistoryView, number_at
from router.http.console.part import Event, LiveRequest, Part, PartFolder, Point
from router.http.console.rates import RateMeter
from router.http.console.snapshot import MAX_LIVE, PoolPicture, Requests, merge, picture_of
from router.http.errors import OURS
from router.http.serving import Serving
from router.http.wire.connections import Connections
from router.pool.journal import PoolEvent, PoolJournal
from router.pool.members import Member
from router.requests.generation import Generation
from runtime.stragglers.rank_picture import describe

MAX_TEXT = 160
"""Of the reason of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertInstance:
    """Whose experts can be recorded."""

    instance: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One that requests can ask for."""

    name: str
    has_chat: bool
    """Whether it has a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the page is told, once a second."""

    at: float
    models: Sequence[ModelRow]
    ready: bool
    missing: Sequence[str]
    num_processes: int
    """That serve this port; those of ``requests.pids`` are covered."""
    requests: Requests
    pool: PoolPicture
    ranks: Sequence[Mapping[str, object]]
    """Of instances whose ranks wait for one another."""
    with_experts: Sequence[ExpertInstance]


class Observer:
    """Of one HTTP process. Its event loop calls ``keep_history`` every half second or so."""

    def __init__(
        self,
        serving: Serving,
        connections: Connections,
        journal: PoolJournal,
        wall: Callable[[], float],
    ) -> None:
        """``wall`` is the wall clock."""
        self._serving, self._connections, self._journal = serving, connections, journal
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._meter = RateMeter(serving.section.lease_ttl_s)
        self._history = History()
        self._number = number_at(wall())
        self._num_answers = 0
        self._loop_lag_s = 0.0
        self._errors: deque[dict[str, int]] = deque([{}], maxlen=NUM_POINTS)
        """At the points of the last five minutes, oldest first."""
        shared_dir = serving.metrics.shared_dir
        self._folder = None if shared_dir is None else PartFolder(Path(shared_dir))

    @property
    def number(self) -> int:
        """Of the newest point of history."""
        return self._number

    def keep_history(self, loop_lag_s: float) -> None:
        """Add a point where its time has come; ``loop_lag_s``: how late the loop is at timers."""
        self._loop_lag_s = loop_lag_s
        wall = self._wall()
        number = number_at(wall)
        if number == self._number:
            return
        self._number = number
        self._history.add(self._point(number, wall), self._picture(wall).point(number))

    def tell_others(self) -> None:
        """Show our part to the other processes, where one of them has viewers."""
        if self._folder is not None and self._folder.is_wanted():
            self._folder.write(self._part())

    def snapshot(self) -> tuple[Snapshot, HistoryView]:
        """What there is to see now."""
        wall, serving = self._wall(), self._serving
        parts = [self._part()]
        if self._folder is not None:
            self._folder.want()
            parts += self._folder.others()
        missing = missing_parts(serving)
        snapshot = Snapshot(
            at=round(wall, 3),
            models=[
                ModelRow(name=one.name, has_chat=one.model.chat_template is not None)
                for one in serving.backends
            ],
            ready=not missing,
            missing=missing,
            num_processes=serving.section.http_processes,
            requests=merge(parts, wall),
            pool=self._picture(wall),
            ranks=[describe(picture) for picture in serving.ranks],
            with_experts=_with_experts(serving.backends.members()),
        )
        return snapshot, self._history.view(self._number, [part.history for part in parts])

    def _picture(self, wall: float) -> PoolPicture:
        backends = self._serving.backends
        members, pools = backends.members(), backends.pools()
        self._meter.observe(members, self._loop.time())

        def state_of(member: Member) -> str:
            return worker_state(member, pools[member.key].recently_failed(member.key))

        return picture_of(
            members,
            self._journal.lost(),
            self._meter,
            load_of=lambda key: pools[key].reported_load(key),
            state_of=state_of,
            wall=wall,
        )

    def _point(self, number: int, wall: float) -> Point:
        serving = self._serving
        answers, errors = sum(serving.metrics.answers().values()), serving.metrics.errors()
        before = self._errors[-1]
        ttfts_s = serving.finished.ttfts_since(wall - STEP_S)
        point = Point(
            number=number,
            num_in_flight=serving.backends.num_in_flight,
            num_waiting=serving.backends.num_waiting,
            num_answers=answers - self._num_answers,
            num_errors=sum(errors.get(code, 0) - before.get(code, 0) for code in OURS),
            num_finished=len(ttfts_s),
            median_ttft_s=median_of(ttfts_s),
        )
        self._num_answers = answers
        self._errors.append(errors)
        return point

    def _part(self) -> Part:
        serving, now = self._serving, self._loop.time()
        backends = serving.backends
        live = {one: backend.name for backend in backends for one in backend.pipeline.live}
        errors, before = serving.metrics.errors(), self._errors[0]
        oldest = sorted(live, key=lambda generation: generation.timings.received)[:MAX_LIVE]
        return Part(
            pid=os.getpid(),
            uptime_s=round(now - self._began, 1),
            num_in_flight=backends.num_in_flight,
            num_waiting=backends.num_waiting,
            max_in_flight=backends.limit,
            oldest_wait_s=max(backend.admission.oldest_wait_s for backend in backends),
            num_connections=len(self._connections),
            loop_lag_s=self._loop_lag_s,
            num_live=len(live),
            live=[_live_request(generation, live[generation], now) for generation in oldest],
            finished=serving.finished.since(self._wall() - WINDOW_S),
            errors=errors,
            recent_errors={code: num - before.get(code, 0) for code, num in errors.items()},
            events=[_event(event) for event in self._journal.events()],
            history=self._history.own(),
        )


def _live_request(generation: Generation, model: str, now: float) -> LiveRequest:
    workers = generation.workers
    return LiveRequest(
        request_id=generation.request_id,
        model=model,
        key_name=generation.key_name,
        phase=generation.phase.partition(",")[0],
        age_s=round(now - generation.timings.received, 3),
        prefill=str(workers[0]) if workers else "",
        decode=str(workers[1]) if workers else "",
        num_prompt_tokens=len(generation.prompt_token_ids),
        num_output_tokens=generation.num_tokens,
        num_migrations=generation.timings.num_migrations,
    )


def _with_experts(members: Sequence[Member]) -> list[ExpertInstance]:
    names = {(m.role.value, m.key.instance) for m in members if m.has_experts}
    return [ExpertInstance(instance=name, role=role) for role, name in sorted(names)]


def _event(event: PoolEvent) -> Event:
    return Event(
        at=round(event.at, 3),
        kind=event.kind.value,
        role=event.role.value,
        instance=event.instance,
        ranks=event.ranks,
        text=event.text[:MAX_TEXT],
    )
