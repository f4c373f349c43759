"""The actor that supervises one child process under Ray, and how the controller calls it.

Ray carries specs and reports, never requests or tensors. Errors of Ray become ours here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from deploy.errors import ClusterError
from deploy.hosts.folder import host_folder, lay_files, remove_files
from deploy.hosts.places import Place
from deploy.plan import KEY_NAME, ProcessSpec
from deploy.ports import free_port
from deploy.running.child import Child, ChildReport, LogPiece, read_log
from deploy.running.launcher import SupervisorLostError
from runtime.errors import ConfigError
from runtime.net.hosts import choose_address, interface_of, own_interfaces

_ResultT = TypeVar("_ResultT")
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 5.0
"""Of a call that is not worth waiting for where the actor's host is gone."""
_PATIENCE_S = 1.0
"""How long one silent host may hold up the news of all others."""
SILENCE_S = 10.0
"""An actor on another host that says nothing for so long is lost; a step of ours lasts moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFacts:
    """Where Ray has put an actor."""

    node: str
    devices: tuple[str, ...]
    """The GPUs that are its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """How an actor's host takes part in a cluster of several."""

    address: str
    interface: str
    folder: str
    request: str
    """For a certificate of the key that the actor has made; empty: it made none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What an actor remembers for a controller that did not start it."""

    spec: ProcessSpec
    place: Place
    group: Any
    """The placement group."""


class ChildActor:
    """The body of the actor: a ``Child`` behind calls.

    Ray runs the methods of such an actor on its main thread, which ends with the actor, and the
    child with it.
    """

    def __init__(self) -> None:
        self._child: Child | None = None
        self._place: Place | None = None
        self._own_files: dict[str, str] = {}
        """Of the process, made here; they never leave this host."""

    def look_around(self) -> ActorFacts:
        """Where this runs, and what it was given."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return ActorFacts(node=context.get_node_id(), devices=tuple(gpus))

    def settle(
        self, *, network: str, ray_host: str, name: str, run_dir: str, makes_key: bool
    ) -> HostFacts:
        """The address of this host in ``network``, or as Ray knows it, and its folder.

        With ``makes_key`` there is a key for the process, and a request for its certificate.

        Raises:
            ClusterError: it has none there, or the folder cannot be made.
        """
        interfaces = own_interfaces()
        address, interface = ray_host, interface_of(ray_host, interfaces)
        if network:
            try:
                own = choose_address(network, interfaces, f"{socket.gethostname()} ({ray_host})")
            except ConfigError as error:  # which does not travel
                raise ClusterError(str(error)) from error
            address, interface = own.address, own.interface
        folder = str(host_folder(name, run_dir, address))
        request = self._make_key() if makes_key else ""
        return HostFacts(address=address, interface=interface, folder=folder, request=request)

    def _make_key(self) -> str:
        from deploy.certificates import KeyRequest, own_names

        made = KeyRequest.make(own_names())
        self._own_files = {KEY_NAME: made.key}
        return made.request

    def free_port(self, host: str) -> int:
        """See ``ports.free_port``: a port of this machine.

        Raises:
            ClusterError: ``host`` is no address of it.
        """
        try:
            return free_port(host)
        except ConfigError as error:
            raise ClusterError(str(error)) from error

    def start(self, spec: ProcessSpec, place: Place) -> int:
        """Start the process; its pid."""
        # Whoever started that Ray may have left it to lower its processes, as it does by default.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        lay_files(spec, self._own_files)
        self._place = place
        self._child = Child(spec)
        return self._child.pid

    def poll(self) -> ChildReport:
        """See ``Child.poll``."""
        assert self._child is not None
        return self._child.poll()

    def read_log(self, offset: int, limit: int) -> LogPiece:
        """See ``child.read_log``."""
        assert self._child is not None
        return read_log(Path(self._child.spec.log_path), offset, limit)

    def remember(self) -> Memory | None:
        """What was started here; None: nothing."""
        import ray

        if self._child is None or self._place is None:
            return None
        group = ray.util.get_current_placement_group()
        return Memory(spec=self._child.spec, place=self._place, group=group)

    def terminate(self) -> None:
        """See ``Child.terminate``."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """See ``Child.kill``; takes away the files of the process."""
        if self._child is not None:
            self._child.kill()
            remove_files(self._child.spec)


class RaySupervisor:
    """Calls one ``ChildActor``."""

    def __init__(self, ray: Any, actor: Any, *, may_be_cut_off: bool) -> None:
        """``may_be_cut_off``: it is on another host, whose silence means that it is lost."""
        self._ray = ray
        self._actor = actor
        self._may_be_cut_off = may_be_cut_off
        self._asking: asyncio.Task[ChildReport] | None = None
        self._asked_at = 0.0
        self._pid = 0
        self._is_lost = False

    async def look_around(self) -> ActorFacts:
        """See ``ChildActor.look_around``; waits until Ray has started the actor.

        Raises:
            ClusterError: Ray cannot start it.
        """
        facts: ActorFacts = await self._call(self._actor.look_around.remote(), "an actor")
        return facts

    async def settle(
        self, *, network: str, ray_host: str, name: str, run_dir: str, makes_key: bool
    ) -> HostFacts:
        """See ``ChildActor.settle``.

        Raises:
            ClusterError: the host cannot take part; names it.
        """
        answer = self._actor.settle.remote(
            network=network, ray_host=ray_host, name=name, run_dir=run_dir, makes_key=makes_key
        )
        facts: HostFacts = await self._call(answer, f"anything on host {ray_host}")
        return facts

    async def free_port(self, host: str) -> int:
        """See ``ChildActor.free_port``.

        Raises:
            ClusterError: that host has no such address.
        """
        port: int = await self._call(self._actor.free_port.remote(host), "the ranks' meeting")
        return port

    async def start(self, spec: ProcessSpec, place: Place) -> None:
        """Start the process.

        Raises:
            ClusterError: the command cannot be executed.
        """
        self._pid = await self._call(self._actor.start.remote(spec, place), spec.name)

    async def remember(self) -> Memory | None:
        """See ``ChildActor.remember``; None also where it does not answer."""
        memory: Memory | None = None
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                memory = await self._actor.remember.remote()
        return memory

    async def poll(self) -> ChildReport:
        """See ``Supervisor.poll``; no news where the actor takes its time."""
        if self._asking is None:
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(_answer(self._actor.poll.remote()))
        await asyncio.wait({self._asking}, timeout=_PATIENCE_S)
        if not self._asking.done():
            silence_s = time.monotonic() - self._asked_at
            if self._may_be_cut_off and silence_s > SILENCE_S:
                self._asking.cancel()
                self._is_lost = True
                raise SupervisorLostError(f"its host has not answered for {silence_s:.0f} s")
            return ChildReport(pid=self._pid, exit_status=None, lines=())
        asking, self._asking = self._asking, None
        try:
            report = asking.result()
        except self._ray.exceptions.RayError as error:
            self._is_lost = True
            raise SupervisorLostError(str(getattr(error, "cause", None) or error)) from error
        self._pid = report.pid
        return report

    async def read_log(self, offset: int, limit: int) -> LogPiece:
        """See ``Supervisor.read_log``."""
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                piece: LogPiece = await self._actor.read_log.remote(offset, limit)
        except (self._ray.exceptions.RayError, TimeoutError) as error:
            raise SupervisorLostError(str(error) or "it does not answer") from error
        return piece

    async def terminate(self) -> None:
        """See ``Supervisor.terminate``."""
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._actor.terminate.remote()

    async def kill(self) -> None:
        """See ``Supervisor.kill``."""
        if not self._is_lost:
            with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await self._actor.kill.remote()
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    async def _call(self, answer: Any, what: str) -> Any:
        exceptions = self._ray.exceptions
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await answer
        except TimeoutError:
            problem = f"Ray has not started {what} within {_START_TIMEOUT_S:g} s"
            raise ClusterError(f"{problem}; `ray status` says how its hosts are") from None
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, ClusterError):
                raise error.cause from error
            raise ClusterError(f"cannot execute {what}: {error.cause}") from error
        except exceptions.RayError as error:
            raise ClusterError(f"Ray could not start {what}: {_plainly(error)}") from error


async def run_all(work: Sequence[Awaitable[_ResultT]]) -> list[_ResultT]:
    """The results of all of ``work``, or its first failure once all of it has ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _answer(answer: Any) -> ChildReport:
    report: ChildReport = await answer
    return report


def _plainly(error: Exception) -> str:
    said = " ".join(str(error).split())
    if "No module named" in said:
        missing = said.partition("No module named")[2].split()[0]
        return f"the Python of Ray on that host has no module {missing}; install Tandem there"
    return said
