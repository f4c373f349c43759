"""One long-lived Frames stream per decode rank, and the way of each delta to its request.

A broken stream may have lost deltas that nothing can ask for again, so its requests fail at once
with PeerLostError, whatever became of the worker; the stream itself is opened anew for as long as
the worker is in the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import PoolView
from router.requests.clients import DecodeStub, WorkerClients
from runtime.errors import PeerLostError, TandemError
from runtime.logging import get_logger
from runtime.pb import decode_pb2
from runtime.rpc import map_rpc_errors

logger = get_logger(__name__)

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 1.0
STANDING_TIMEOUT_S = 5.0


class TokenSink(Protocol):
    """A request that waits for deltas. Both are called on the event loop and must not raise."""

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        """News of this request, in order."""

    def on_lost(self, error: TandemError) -> None:
        """No more deltas will come."""


class FrameStream:
    """The stream of one life of one decode rank."""

    def __init__(
        self,
        member: Member,
        stub: DecodeStub,
        router_id: str,
        *,
        on_load: Callable[[WorkerKey, WorkerLoad], None],
        on_loss: Callable[[WorkerKey, str], None],
    ) -> None:
        self.key = member.key
        self._address = member.address
        self._stub = stub
        self._router_id = router_id
        self._on_load = on_load
        self._on_loss = on_loss
        self._sinks: dict[str, TokenSink] = {}
        self._stands = False
        self._waiters: list[asyncio.Future[None]] = []
        """Who waits for the outcome of the present attempt to connect."""
        self._task = asyncio.create_task(self._run(), name=f"frames-{member.key}")

    @property
    def num_attached(self) -> int:
        """Requests that wait for deltas."""
        return len(self._sinks)

    async def standing(self) -> None:
        """Wait until the stream stands: no delta of a request reserved from now on is missed.

        Raises:
            PeerLostError: the present attempt to connect fails, or takes more than 5 s.
        """
        if self._stands:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(STANDING_TIMEOUT_S):
                await waiter
        except TimeoutError:
            raise self._unreachable("no answer") from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def attach(self, request_id: str, sink: TokenSink) -> None:
        """Send the deltas of ``request_id`` to ``sink``."""
        self._sinks[request_id] = sink

    def detach(self, request_id: str) -> None:
        """Send them no more; later deltas are dropped."""
        self._sinks.pop(request_id, None)

    def stop(self) -> None:
        """Make no further call; ``close`` has to follow."""
        self._task.cancel()

    async def close(self, reason: str) -> None:
        """End the stream; requests that still wait fail with ``reason``."""
        self.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._fail_all(reason)

    async def _run(self) -> None:
        delay_s = RECONNECT_FIRST_S
        while True:
            try:
                with map_rpc_errors(f"decode {self.key}"):
                    await self._read()
                reason = "the worker ended the stream"
            except TandemError as error:
                reason = error.message
            if self._stands:
                delay_s = RECONNECT_FIRST_S
                self._stands = False
                self._on_loss(self.key, reason)
            self._fail_all(reason)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RECONNECT_MAX_S)

    async def _read(self) -> None:
        call = self._stub.Frames(decode_pb2.FramesRequest(router_id=self._router_id))
        try:
            async for frame in call:
                epoch = frame.decode.epoch
                if epoch not in (0, self.key.epoch):
                    raise PeerLostError(f"decode {self.key} was replaced behind {self._address}")
                if not self._stands:
                    self._stand()
                self._deliver(frame)
        finally:
            call.cancel()

    def _stand(self) -> None:
        self._stands = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _deliver(self, frame: decode_pb2.Frame) -> None:
        for delta in frame.deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is not None:
                sink.on_delta(delta)
        if frame.HasField("load"):
            load = frame.load
            self._on_load(
                self.key,
                WorkerLoad(
                    num_requests_running=load.num_requests_running,
                    num_requests_waiting=load.num_requests_waiting,
                    num_free_blocks=load.num_free_blocks,
                    num_total_blocks=load.num_total_blocks,
                    num_quarantined_blocks=load.num_quarantined_blocks,
                ),
            )

    def _fail_all(self, reason: str) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._unreachable(reason))
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.on_lost(PeerLostError(f"the tokens of decode {self.key} stopped: {reason}"))

    def _unreachable(self, reason: str) -> PeerLostError:
        return PeerLostError(f"decode {self.key} at {self._address} cannot be reached: {reason}")


class FrameStreams:
    """A stream for every decode rank of the pool, standing before the first request needs it."""

    def __init__(self, pool: PoolView, clients: WorkerClients, router_id: str) -> None:
        self._pool = pool
        self._clients = clients
        self._router_id = router_id
        self._streams: dict[WorkerKey, FrameStream] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def stream(self, member: Member) -> FrameStream:
        """The stream of ``member``, opened where there is none."""
        stream = self._streams.get(member.key)
        if stream is None:
            stream = FrameStream(
                member,
                self._clients.decode(member),
                self._router_id,
                on_load=self._pool.report,
                on_loss=self._pool.mark_failed,
            )
            self._streams[member.key] = stream
        return stream

    def follow_pool(self) -> None:
        """Open streams to new decode ranks, close those of ranks that are gone.

        A lease that ran out while its stream still stands is not a death: that stream stays until
        its requests are over, unless the place was taken by another life.
        """
        members = {member.key: member for member in self._pool.members(Role.DECODE)}
        places = {(key.instance, key.rank) for key in members}
        for member in members.values():
            self.stream(member)
        for key, stream in list(self._streams.items()):
            replaced = (key.instance, key.rank) in places
            if key not in members and (replaced or not stream.num_attached):
                del self._streams[key]
                reason = "it was restarted" if replaced else "it left the pool"
                stream.stop()  # at once: its channel is closed next
                task = asyncio.create_task(stream.close(reason), name=f"close-frames-{key}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def keys_in_use(self) -> set[WorkerKey]:
        """Decode ranks whose stream is open."""
        return set(self._streams)

    async def close(self) -> None:
        """End all streams."""
        streams = list(self._streams.values())
        self._streams.clear()
        await asyncio.gather(*(stream.close("the router is shutting down") for stream in streams))
        await asyncio.gather(*self._closing, return_exceptions=True)
