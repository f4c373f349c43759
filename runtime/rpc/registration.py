"""A worker's membership in routers' pools: register, renew with fresh load, leave.

A lease is the only proof of life that a router has, and all that it remembers: one that was
restarted knows no lease, and the worker registers again by itself. Routers know nothing of one
another; a worker holds a lease at each.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial

import psutil

from runtime.background import BackgroundTasks
from runtime.errors import ConfigError, InternalError, TandemError
from runtime.logging import get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.net.router_names import (
    Resolve,
    RouterAt,
    RouterName,
    follow,
    parse_routers,
    resolve_host,
)
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import map_rpc_errors, open_channel
from runtime.rpc.wire import error_from_proto, own_wire, why_refused

logger = get_logger(__name__)

RETRY_S = 0.5
REFUSED_RETRY_MAX_S = 10.0
REGISTER_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 2.0
MIN_RENEW_TIMEOUT_S = 0.2

LoadSource = Callable[[], registry_pb2.WorkerLoad]


class RegistryClient:
    """Keeps one worker registered from ``start`` to ``close``."""

    def __init__(
        self,
        routers: str,
        credentials: Credentials,
        record: registry_pb2.WorkerRecord,
        load: LoadSource,
        *,
        resolve: Resolve = resolve_host,
    ) -> None:
        """``routers`` says where registries are, as in `runtime.net.router_names`.

        ``load`` is called on the event loop at each renewal, makes a new message and must not
        block. What it does not number is numbered here.

        Raises:
            ValueError: ``routers`` cannot be read.
        """
        mine = registry_pb2.WorkerRecord()
        mine.CopyFrom(record)
        mine.started_ms = record.started_ms or round(psutil.Process().create_time() * 1000)
        self._routers = parse_routers(routers)
        self._open = partial(_Lease, credentials, mine, load, self._hear, num_held=self._num_held)
        self._resolve = resolve
        self._by_router: dict[RouterAt, _Lease] = {}
        self._tasks = BackgroundTasks()
        self._draining = False
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = loop.create_future()
        """What the first router that answered said."""
        self._over: asyncio.Future[None] = loop.create_future()
        """What ended the renewal; or the end of this client."""
        for outcome in (self._first, self._over):
            outcome.add_done_callback(_look_at)  # perhaps nobody waits for it

    @property
    def is_registered(self) -> bool:
        """Whether a router has this worker in its pool, as far as we know."""
        return self._num_held() > 0

    @property
    def refusal(self) -> str:
        """Why a router does not take this worker, where none has it; empty: none said so."""
        if self.is_registered:
            return ""
        return next((lease.refusal for lease in self._leases if lease.refusal), "")

    async def start(self) -> None:
        """Register, waiting for a router that is not up yet, and keep renewing.

        Returns when the first of several routers has answered; the others may come later.

        Raises:
            ConfigError: that registry refuses this worker, or is one that we cannot work with.
        """
        for router in self._routers:
            if isinstance(router, RouterAt):
                self._begin(router)
            else:
                task = self._tasks.start(self._follow(router), name=f"routers at {router.host}")
                what = f"the list of routers at {router.host}"
                task.add_done_callback(partial(self._hear_end, what))
        await asyncio.wait({self._first, self._over}, return_when=asyncio.FIRST_COMPLETED)
        await (self._first if self._first.done() else self.wait_failed())

    async def wait_failed(self) -> None:
        """Raise what ended the renewal, should anything: nothing keeps the worker in its pool then.

        Returns when the client was closed.
        """
        await asyncio.shield(self._over)

    def set_draining(self) -> None:
        """Tell the routers at once that this worker takes nothing new."""
        self._draining = True
        for lease in self._leases:
            lease.set_draining()

    async def close(self) -> None:
        """Leave the pools; an unreachable router is left to the lease."""
        if not self._over.done():
            self._over.set_result(None)
        await self._tasks.close()
        await asyncio.gather(*(lease.close() for lease in self._leases))

    def _num_held(self) -> int:
        return sum(lease.is_held for lease in self._leases)

    @property
    def _leases(self) -> list[_Lease]:
        return list(self._by_router.values())

    async def _follow(self, name: RouterName) -> None:
        """Hold a lease at all routers that ``name`` stands for, and at no others."""
        mine: set[RouterAt] = set()
        async with contextlib.aclosing(follow(name, self._resolve)) as answers:
            async for answer in answers:
                for router in mine - set(answer):
                    lease = self._by_router.pop(router)
                    logger.info("a router is gone name=%s address=%s", name.host, router.address)
                    self._tasks.start(lease.close(), name=f"leave {router.address}")
                for router in set(answer) - mine:
                    self._begin(router)
                mine = set(answer)

    def _begin(self, router: RouterAt) -> None:
        lease = self._by_router[router] = self._open(router)
        if self._draining:
            lease.set_draining()
        lease.begin(partial(self._hear_end, f"the lease at {router.address}"))

    def _hear(self, refusal: ConfigError | None) -> None:
        if self._first.done():
            return
        if refusal is None:
            self._first.set_result(None)
        else:
            self._first.set_exception(refusal)

    def _hear_end(self, what: str, task: asyncio.Task[None]) -> None:
        """A task has failed that only ``close`` may end: cancelled counts."""
        if self._over.done() or (not task.cancelled() and task.exception() is None):
            return
        error = InternalError(f"{what} is not renewed any more")
        error.__cause__ = None if task.cancelled() else task.exception()
        self._over.set_exception(error)


def _look_at(outcome: asyncio.Future[None]) -> None:
    if not outcome.cancelled():
        outcome.exception()


class _Lease:
    """The place in one router's pool."""

    def __init__(
        self,
        credentials: Credentials,
        record: registry_pb2.WorkerRecord,
        load: LoadSource,
        tell: Callable[[ConfigError | None], None],
        router: RouterAt,
        *,
        num_held: Callable[[], int],
    ) -> None:
        """``tell`` hears the first answer, None for a lease; ``num_held`` counts all leases."""
        self._peer = f"registry {router.address}"
        self._channel = open_channel(
            router.address, credentials, Role.ROUTER, server_name=router.name
        )
        self._stub = registry_pb2_grpc.RegistryStub(self._channel)
        self._record = record
        self._load = load
        self._num_loads = 0
        self._lease_id = ""
        self._ttl_s = 1.0
        self._held_until = 0.0
        self._trouble = ""
        """Of the last try, so that it is logged once."""
        self.refusal = ""
        """Why the router does not take us, by its last answer; empty where it may yet."""
        self._draining = False
        self._closing = False
        self._changed = asyncio.Event()
        self._tell = tell
        self._num_held = num_held
        self._is_answered = False
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[registry_pb2.RegisterResponse] | None = None
        """A registration whose answer has not been taken."""

    @property
    def is_held(self) -> bool:
        return bool(self._lease_id) and time.monotonic() < self._held_until

    def begin(self, on_end: Callable[[asyncio.Task[None]], None]) -> None:
        """Keep it until ``close``; should the task end before, ``on_end`` hears of it."""
        self._task = asyncio.create_task(self._keep(), name=f"lease at {self._peer}")
        self._on_end = on_end
        self._task.add_done_callback(on_end)

    def set_draining(self) -> None:
        self._draining = True
        self._changed.set()

    async def close(self) -> None:
        self._closing = True
        if self._task is not None:
            self._task.remove_done_callback(self._on_end)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._asking is not None:
            # Granted, maybe: a lease that nobody gives back has requests sent here until it ends.
            with contextlib.suppress(TandemError, TimeoutError):
                self._lease_id = (await asyncio.wait_for(self._asking, LEAVE_TIMEOUT_S)).lease_id
        if self._lease_id:
            await self._give_back(self._lease_id)
        await self._channel.close(None)

    async def _keep(self) -> None:
        # A cancel that meets the end of a wait or of a call can be lost; the flag cannot.
        while not self._closing:
            await self._register()
            while self._lease_id and not self._closing:
                await self._renew()

    async def _register(self) -> None:
        """Return with a lease."""
        refused_s = RETRY_S
        while not self._closing:
            self._asking = asyncio.create_task(self._ask())
            try:
                response = await asyncio.shield(self._asking)
            except TandemError as error:
                self._asking = None
                self.refusal = ""
                self._note_trouble("cannot register yet", error.message)
                await asyncio.sleep(RETRY_S)
                continue
            self._asking = None
            refusal = await self._refusal_of(response)
            if not refusal:
                self._take(response)
                return
            self._note_trouble(f"refused by {self._peer}, serving nothing", refusal, refusal)
            if not response.superseded:
                self.refusal = refusal
                name = self._record.identity.instance
                problem, _, fix = refusal.partition(". Fix: ")
                fix = fix or "the router's model and settings"
                self._answer(ConfigError("worker", name, problem, fix))
            await asyncio.sleep(refused_s)
            refused_s = min(2 * refused_s, REFUSED_RETRY_MAX_S)

    async def _refusal_of(self, response: registry_pb2.RegisterResponse) -> str:
        """Why we are not in this pool after such an answer; empty: we are.

        A router that speaks something else may have let us in, as an older one does that asks for
        no number. Then it must send nothing here: the lease goes back.
        """
        if response.HasField("error"):
            return error_from_proto(response.error).message
        refusal = why_refused(self._peer, response.wire)
        if refusal:
            await self._give_back(response.lease_id)
        return refusal

    async def _give_back(self, lease_id: str) -> None:
        try:
            with map_rpc_errors(self._peer):
                request = registry_pb2.DeregisterRequest(lease_id=lease_id)
                await self._stub.Deregister(request, timeout=LEAVE_TIMEOUT_S)
        except TandemError as error:
            logger.info("leaving without the router: %s", error)

    async def _ask(self) -> registry_pb2.RegisterResponse:
        with map_rpc_errors(self._peer):
            answer: registry_pb2.RegisterResponse = await self._stub.Register(
                self._registration(), timeout=REGISTER_TIMEOUT_S
            )
        return answer

    def _registration(self) -> registry_pb2.RegisterRequest:
        request = registry_pb2.RegisterRequest(
            worker=self._record, load=self._numbered_load(), wire=own_wire()
        )
        request.worker.draining = self._draining
        request.worker.num_routers = self._num_held() + (not self.is_held)
        return request

    def _take(self, response: registry_pb2.RegisterResponse) -> None:
        self._lease_id = response.lease_id
        self._ttl_s = response.lease_ttl_s
        self._trouble = self.refusal = ""
        self._hold()
        logger.info("registered lease_id=%s ttl_s=%g", self._lease_id, self._ttl_s)
        self._answer(None)

    def _answer(self, refusal: ConfigError | None) -> None:
        if not self._is_answered:
            self._is_answered = True
            self._tell(refusal)

    async def _renew(self) -> None:
        """Wait until it is time, then renew; one lost call is repeated while the lease runs."""
        pause_s = self._ttl_s / (12 if self._trouble else 3)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), pause_s)
        self._changed.clear()
        request = registry_pb2.RenewRequest(
            lease_id=self._lease_id,
            load=self._numbered_load(),
            draining=self._draining,
            num_routers=self._num_held() + (not self.is_held),
        )
        timeout_s = max(MIN_RENEW_TIMEOUT_S, self._ttl_s / 4)
        try:
            with map_rpc_errors(self._peer):
                response = await self._stub.Renew(request, timeout=timeout_s)
        except TandemError as error:
            self._note_trouble("cannot renew the lease", error.message)
            return
        if self._trouble:
            logger.info("the lease is renewed again lease_id=%s", self._lease_id)
        self._trouble = ""
        if response.known:
            self._hold()
        else:
            logger.warning("the router does not know the lease any more: registering again")
            self._lease_id = ""

    def _hold(self) -> None:
        self._held_until = time.monotonic() + self._ttl_s

    def _numbered_load(self) -> registry_pb2.WorkerLoad:
        load = self._load()
        if not load.sequence:
            self._num_loads += 1
            load.sequence = self._num_loads
        load.clock_s = time.monotonic()
        return load

    def _note_trouble(self, what: str, reason: str, kind: str = "") -> None:
        if (what + kind) != self._trouble:
            self._trouble = what + kind
            logger.warning("%s: %s", what, reason)
