"""Runs a cluster: starts all instances, waits until they serve, keeps them alive, stops them.

While the cluster starts, any death ends it, with the reason: a configuration that cannot work must
not restart for ever. Once ready, a dead instance is restarted. The controller touches no request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence

from deploy.child import LogPiece
from deploy.errors import ClusterError, ProcessDiedError
from deploy.instance import Death, Instance
from deploy.launcher import Launcher
from deploy.plan import Role, RunContext, plan_instances
from deploy.pool_watch import PoolWatch
from deploy.state import Phase, ProcessState
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

_STARTING_TICK_S = 0.2
_SERVING_TICK_S = 0.5
_KILL_AFTER_S = 32.0
"""Longer than any role's own grace period, after which it ends by itself."""

OnChange = Callable[[Phase, Sequence[ProcessState]], None]


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
        former: Sequence[ProcessState] = (),
    ) -> None:
        """``on_change`` hears of every tick.

        ``former`` are the processes of a controller that is gone: those that still run are taken
        over, the others start anew.

        The start may take ``timeout_s`` seconds, the end ``grace_s`` for the router and as much
        again for the workers.
        """
        self._instances = [
            Instance(plan, context, launcher) for plan in plan_instances(context.config)
        ]
        self._context = context
        self._watch = PoolWatch(context.control_address, context.endpoint, context.credentials)
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._former = {process.instance: process.num_restarts for process in former}
        self.goes_on = False
        """Whether ``run`` leaves the processes to themselves."""
        self._phase = Phase.STARTING
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._hurry = asyncio.Event()
        self._stop = asyncio.Event()

    def request_stop(self) -> None:
        """End the run in order; asked for a second time: at once."""
        if self._stop.is_set():
            self._hurry.set()
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
            await self._watch.close()
            await self._end_restarts()
            if not self.goes_on:
                await self._stop_all()

    async def _start_and_serve(self) -> None:
        logger.info("starting %s", fields(num_instances=len(self._instances)))
        self._watch.start()
        if self._former:
            await self._take_over()
        else:
            await self._start()
        while True:
            await self._serve_tick()
            await asyncio.sleep(_SERVING_TICK_S)

    async def _take_over(self) -> None:
        """Adopt what runs; what does not is restarted while the rest serves."""
        self._phase = Phase.READY
        for instance in self._instances:
            name = instance.plan.name
            if await instance.adopt(self._former.get(name, 0)):
                logger.info("took over %s", fields(instance=name))
            else:
                pause_s = instance.pause_before_restart(self._watch.members)
                task = asyncio.create_task(self._restart(instance, None, pause_s))
                self._restarts[name] = task

    async def _start(self) -> None:
        # Room is asked for in this order: what needs most of one host, while hosts are empty.
        by_size = sorted(self._instances, key=lambda one: -max(one.plan.num_ranks_by_host))
        await asyncio.gather(*(instance.start() for instance in by_size))
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._start_tick():
                    await asyncio.sleep(_STARTING_TICK_S)
        except TimeoutError:
            raise ClusterError(self._describe_late()) from None
        self._set_phase(Phase.READY)
        logger.info("ready")

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
        deaths = await self._poll(self._instances)
        if deaths:
            _, death = deaths[0]
            raise ProcessDiedError(f"{death}:\n{death.log_tail()}\nwhole log: {death.log_path}")
        return all(instance.phase is Phase.READY for instance in self._instances)

    async def _serve_tick(self) -> None:
        for name in [name for name, task in self._restarts.items() if task.done()]:
            self._restarts.pop(name).result()
        settled = [one for one in self._instances if one.plan.name not in self._restarts]
        for instance, death in await self._poll(settled):
            pause_s = instance.pause_before_restart(self._watch.members, death)
            logger.warning("%s; restarting %s", death, fields(pause_s=pause_s))
            task = asyncio.create_task(self._restart(instance, death, pause_s))
            self._restarts[instance.plan.name] = task

    async def _poll(self, instances: Sequence[Instance]) -> list[tuple[Instance, Death]]:
        """Read all news, publish them, and return who died."""
        ready = await self._ready_routers(instances)
        deaths = await asyncio.gather(*(instance.poll() for instance in instances))
        for instance, death in zip(instances, deaths, strict=True):
            if death is None:
                instance.update_phase(self._watch.members, router_ready=instance.plan.name in ready)
        self._publish()
        return [
            (instance, death)
            for instance, death in zip(instances, deaths, strict=True)
            if death is not None
        ]

    async def _ready_routers(self, instances: Sequence[Instance]) -> set[str]:
        """Of the routers that are awaited, those that answer."""
        awaited = [
            instance.plan
            for instance in instances
            if instance.plan.role is Role.ROUTER and instance.phase is not Phase.READY
        ]
        endpoints = [self._context.endpoints[plan.index] for plan in awaited]
        answers = await asyncio.gather(*map(self._watch.is_ready, endpoints))
        return {plan.name for plan, is_ready in zip(awaited, answers, strict=True) if is_ready}

    async def _restart(self, instance: Instance, death: Death | None, pause_s: float) -> None:
        if death is not None and death.is_orderly:
            # The other ranks leave with it, and have answers to deliver.
            await instance.wait_ended(self._grace_s, self._hurry)
        await instance.kill()
        self._publish()
        while True:
            await asyncio.sleep(pause_s)
            try:
                await instance.start()
                break
            except ClusterError as error:
                pause_s = instance.pause_before_restart(self._watch.members)
                logger.warning("%s", error)
        logger.info("restarted %s", fields(instance=instance.plan.name))

    async def _end_restarts(self) -> None:
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)

    async def _stop_all(self) -> None:
        if self._phase is Phase.STARTING:
            self._hurry.set()  # Nothing was served yet: there is nothing to drain.
        self._set_phase(Phase.STOPPING)
        # The router first: its requests can only end while the workers still serve.
        routers = [one for one in self._instances if one.plan.role is Role.ROUTER]
        workers = [one for one in self._instances if one.plan.role is not Role.ROUTER]
        for group in (routers, workers):
            await asyncio.gather(*(one.stop(self._grace_s, self._hurry) for one in group))
            self._publish()

    async def read_log(self, name: str, offset: int, limit: int) -> LogPiece:
        """Part of the log of process ``name``, on whatever host; see ``child.read_log``.

        Raises:
            ClusterError: there is no such process, or its host does not answer.
        """
        for instance in self._instances:
            for state in instance.process_states():
                if state.name == name:
                    return await instance.read_log(state.rank, offset, limit)
        names = [state.name for one in self._instances for state in one.process_states()]
        raise ClusterError(f"no process is called {name!r}; there are {', '.join(names)}")

    def _describe_late(self) -> str:
        late = [
            f"{state.name} ({state.stage or 'silent'})"
            for instance in self._instances
            for state in instance.process_states()
            if state.phase is not Phase.READY
        ]
        return f"not ready after {self._timeout_s:g} s; still starting: {', '.join(late)}"

    def _set_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._publish()

    def _publish(self) -> None:
        states = [state for one in self._instances for state in one.process_states()]
        self._on_change(self._phase, states)
