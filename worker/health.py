"""Whether a worker can still do its work, part by part: `/health`, and gauges of the same.

A process may live and answer scrapes while a thread that every request waits for is gone. So each
part says what is wrong with it, from whatever thread asks. Routers that are out of reach are no
fault of the worker's: starting it again would not help.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from runtime.garbage import CollectorPauses
from runtime.metrics.core import counter_of, gauge_of
from runtime.metrics.process import ProcessMetrics
from worker.step_loop import StepLoop

PROBE_S = 0.5
MAX_LAG_S = 5.0
"""The event loop answers late by more than a lease allows."""
MAX_TURN_S = 60.0
"""Longer than a step should ever take, also where no time limit ends it (`step_timeout_s` 0)."""

Check = Callable[[], str]
"""What is wrong; empty where nothing is. Cheap, and for any thread."""


class Health:
    """The parts of one process; `report` is for the event loop."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Know the event loop only, which `watch_event_loop` measures."""
        self._clock, self._registry = clock, registry
        self.process = ProcessMetrics(registry)
        self.pauses = CollectorPauses()
        self._due_at: float | None = None
        self._lag_s = 0.0
        self._loop: StepLoop[Any] | None = None
        self._checks: dict[str, Check] = {}
        self._healthy = Gauge(
            "pd_worker_healthy", "1 while a part does its work", ["part"], registry=registry
        )
        gauge_of(
            registry,
            "pd_worker_event_loop_lag_seconds",
            "How late the event loop came to its latest probe, or is now",
            lambda: self.lag_s,
        )
        gauge_of(
            registry,
            "pd_worker_turn_age_seconds",
            "Since the engine loop's latest turn began; 0 while nobody has work",
            lambda: self._loop.turn_age_s if self._loop else 0.0,
        )
        counter_of(
            registry,
            "pd_worker_gc_pauses",
            "Garbage collections that took more than 10 ms, in which the process stood still",
            lambda: self.pauses.num_long,
        )
        self.add("event_loop", self._check_event_loop)

    @property
    def lag_s(self) -> float:
        """How late the event loop came to its latest probe, or is for the next."""
        late_s = 0.0 if self._due_at is None else self._clock() - self._due_at
        return max(self._lag_s, late_s)

    def add(self, part: str, check: Check) -> None:
        """Watch one more part."""
        self._checks[part] = check
        self._healthy.labels(part).set_function(lambda: float(not check()))

    def watch_loop(self, loop: StepLoop[Any]) -> None:
        """Watch the engine loop, and its steps with the other ranks."""
        self._loop = loop
        counter_of(
            self._registry,
            "pd_worker_step_tokens",
            "Tokens that this rank brought to the steps of its group",
            lambda: loop.num_tokens,
        )
        counter_of(
            self._registry,
            "pd_worker_longest_step_tokens",
            "In the same steps, tokens of the rank that brought most",
            lambda: loop.num_tokens_of_most,
        )
        self.add("engine_loop", lambda: _check_turns(loop))
        self.add("steps", lambda: "a step or a meeting was given up" if loop.is_overdue else "")

    async def watch_event_loop(self) -> None:
        """Probe the event loop until cancelled."""
        while True:
            self.process.measure()
            self._due_at = self._clock() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lag_s = max(0.0, self._clock() - self._due_at)

    def report(self) -> dict[str, str]:
        """What is wrong with each part; empty for one that does its work."""
        return {part: check() for part, check in self._checks.items()}

    def _check_event_loop(self) -> str:
        return f"held up for {self.lag_s:.1f} s" if self.lag_s > MAX_LAG_S else ""


def _check_turns(loop: StepLoop[Any]) -> str:
    if not loop.is_alive:
        return "its thread has ended"
    age_s = loop.turn_age_s
    return f"has work, and is in one turn for {age_s:.0f} s" if age_s > MAX_TURN_S else ""


def thread_check(is_alive: Callable[[], bool]) -> Check:
    """The check of a thread that must not end while anything is served."""
    return lambda: "" if is_alive() else "its thread has ended"
