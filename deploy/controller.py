"""Runs a cluster: starts all instances, waits until they serve, keeps them alive, stops them.

While the cluster starts, any death ends it, with the reason: a configuration that cannot work must
not restart for ever. Once ready, a dead instance is restarted, and operators may change which
instances there are (`deploy.control`). The controller touches no request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.control.events import Event, EventKind, EventLog, interrupted
from deploy.control.membership import died_while_starting
from deploy.control.pool_events import PoolEvents
from deploy.errors import ClusterError
from deploy.plan import Role, RunContext
from deploy.running.fleet import Fleet, FleetTimes
from deploy.running.launcher import Launcher
from deploy.state import Phase, ProcessState
from deploy.views.pool_watch import PoolWatch
from runtime.logging import fields, get_logger

if TYPE_CHECKING:
    from deploy.control.service import ControllerServer

logger = get_logger(__name__)

_STARTING_TICK_S = 0.2
_SERVING_TICK_S = 0.5
_DRAIN_S = 30.0
"""For requests at what leaves, as `--deadline` of the commands."""
_KILL_AFTER_S = 32.0
"""Longer than any role's own grace period, after which it ends by itself."""
_WORKERS = frozenset({Role.PREFILL, Role.DECODE})

OnChange = Callable[[Phase, Sequence[ProcessState]], None]
OnListening = Callable[[str], None]
"""Hears the address at which the controller takes orders."""


class Controller:
    """One run of a cluster, on one event loop."""

    def __init__(
        self,
        context: RunContext,
        launcher: Launcher,
        *,
        on_change: OnChange,
        timeout_s: float,
        grace_s: float = _KILL_AFTER_S,
        on_listening: OnListening = lambda address: None,
        events_path: Path | None = None,
        former: Sequence[ProcessState] = (),
    ) -> None:
        """``on_change`` hears of every tick.

        ``former`` are the processes of a controller that is gone: those that still run are taken
        over, the others start anew.

        The start may take ``timeout_s`` seconds, the end ``grace_s`` for the router and as much
        again for the workers. Events go to ``events_path``.
        """
        self._events = EventLog(events_path)
        self._watch = PoolWatch(
            context.control_address,
            context.endpoint,
            context.credentials,
            on_members=PoolEvents(self._events).take,
        )
        self.fleet = Fleet(
            context,
            launcher,
            self._watch,
            self._events,
            FleetTimes(start_s=timeout_s, grace_s=grace_s),
            self._publish,
        )
        """What runs."""
        self._on_change = on_change
        self._on_listening = on_listening
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._former = tuple(former)
        self._interrupted: list[Event] = []
        """Operations of a controller that is gone, until they are being finished."""
        self.goes_on = False
        """Whether ``run`` leaves the processes to themselves."""
        self._phase = Phase.STARTING
        self._server: ControllerServer | None = None
        self._stop = asyncio.Event()

    def request_stop(self) -> None:
        """End the run in order; asked for a second time: at once."""
        if self._stop.is_set():
            self.fleet.hurry.set()
        self._stop.set()

    def request_leave(self) -> None:
        """End the controller alone, for another one to take over; before it is ready: all."""
        self.goes_on = self._phase is Phase.READY
        self.request_stop()

    def request_abandon(self) -> None:
        """End the controller alone, because nobody hears of what it wants done."""
        self.goes_on = True
        self.request_stop()

    async def run(self) -> None:
        """Run until ``request_stop``; on return every process is gone.

        Raises:
            ClusterError: the cluster did not become ready, or cannot go on.
        """
        try:
            await self._until_stopped(self._start_and_serve())
        finally:
            if self._server is not None:
                await self._server.close(goes_on=self.goes_on)
            await self._watch.close()
            await self.fleet.close()
            if not self.goes_on:
                await self._stop_all()

    async def _start_and_serve(self) -> None:
        logger.info("starting %s", fields(num_instances=len(self.fleet.instances)))
        broken_off = interrupted(self._events.newest())
        self._events.add(EventKind.STARTED, f"starting {self.fleet.context.config.cluster.name}")
        for event in broken_off:
            text = f"{event.text}: its controller ended before it did"
            self._events.add(EventKind.FAILED, text, who=event.who)
        self._watch.start()
        if self._former:
            self._interrupted = broken_off
            await self._take_over()
        else:
            await self._start()
        while True:
            await self._serve_tick()
            await asyncio.sleep(_SERVING_TICK_S)

    async def _take_over(self) -> None:
        """Adopt what runs; what does not is restarted while the rest serves."""
        self._phase = Phase.READY
        await self.fleet.take_over(self._former)
        await self._listen()

    async def _start(self) -> None:
        await self.fleet.start_all()
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._start_tick():
                    await asyncio.sleep(_STARTING_TICK_S)
        except TimeoutError:
            raise ClusterError(self._describe_late()) from None
        await self._listen()
        self._set_phase(Phase.READY)
        logger.info("ready")
        self._events.add(EventKind.READY, "everything serves")

    async def _listen(self) -> None:
        # Imported late: gRPC must not be loaded yet when Ray starts its daemons.
        from deploy.control.service import serve_controller

        self._server = await serve_controller(self.fleet, self._events)
        self._on_listening(self._server.address)

    async def _until_stopped(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if task.done():
            task.result()
        task.cancel()
        await asyncio.wait({task})

    async def _start_tick(self) -> bool:
        deaths = await self.fleet.poll()
        self._publish()
        if deaths:
            _, death = deaths[0]
            raise died_while_starting(death)
        return all(instance.phase is Phase.READY for instance in self.fleet.instances)

    async def _serve_tick(self) -> None:
        self.fleet.reap()
        for instance, death in await self.fleet.poll():
            self.fleet.revive(instance, death)
        if self._interrupted and self._knows_all():
            self._finish()
        self._publish()

    def _knows_all(self) -> bool:
        """Whether all that was taken over serves, or has had its time to."""
        is_late = time.monotonic() - self._began > self._timeout_s
        known = (Phase.READY, Phase.DRAINED, Phase.STOPPED)
        return is_late or all(one.phase in known for one in self.fleet.instances)

    def _finish(self) -> None:
        """Begin to make whole what operations of a former controller left half done."""
        from deploy.control.apply import prepare_finish

        assert self._server is not None
        try:
            prepared = prepare_finish(self.fleet, self._interrupted, _DRAIN_S)
            self._server.desk.begin(prepared.request, prepared.work)
        except ClusterError as error:  # an operator's turn, or too few serve: at the next tick
            logger.info("%s", error)
        else:
            self._interrupted = []

    async def _stop_all(self) -> None:
        if self._phase is Phase.STARTING:
            self.fleet.hurry.set()  # Nothing was served yet: there is nothing to drain.
        self._events.add(EventKind.STOPPING, "the cluster stops")
        self._set_phase(Phase.STOPPING)
        # The router first: its requests can only end while the workers still serve.
        for roles in (frozenset({Role.ROUTER}), _WORKERS):
            await self.fleet.stop_all(roles)
            self._publish()

    def _describe_late(self) -> str:
        late = [
            f"{state.name} ({state.stage or 'silent'})"
            for state in self.fleet.process_states()
            if state.phase is not Phase.READY
        ]
        return f"not ready after {self._timeout_s:g} s; still starting: {', '.join(late)}"

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._publish()

    def _publish(self) -> None:
        self._on_change(self._phase, self.fleet.process_states())
