"""One long-lived Frames stream per decode rank, and the way of each delta to its request.

A broken stream has lost nothing for good: it is opened anew, and asks for what its requests lack.
They are told of a loss only where the worker does not take calls any more, is another life, has
left the pool, or is away for too long. So is one that says nothing, though its connection stands:
its event loop hangs, as a stream without news has a frame every second. The stream is opened for as
long as the worker is in the pool. See docs/adr/0011-continuation.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from router.errors import as_tandem_error
from router.pool.members import Member, Role, WorkerKey, WorkerLoad, load_from_proto
from router.pool.view import PoolView
from router.requests.clients import DecodeStub, FramesCall, WorkerClients
from router.requests.rows import RowSinks
from runtime.background import BackgroundTasks, tell_failure
from runtime.errors import PeerLostError, TandemError
from runtime.garbage import forget_frames
from runtime.logging import get_logger
from runtime.pb import decode_pb2
from runtime.rpc.grpc_calls import map_rpc_errors
from runtime.trace.context import without_trace

logger = get_logger(__name__)

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 1.0
STANDING_TIMEOUT_S = 5.0
STEADY_S = 1.0
"""A stream that broke before this age counts as a failure to connect."""
LISTEN_S = 5.0
"""So often it is looked whether anything came."""
MAX_SILENT = 2
"""So many times in a row nothing may have come. Counted, not timed: a router that stood still for
long has not read what came meanwhile."""
MAX_FAILURES = 3
"""So many of these in a row, and the requests of the stream go elsewhere."""


class TokenSink(Protocol):
    """A request that waits for deltas. All is called on the event loop."""

    @property
    def next_index(self) -> int | None:
        """Output index of the next token to come; None where none has to."""

    def on_token(self, index: int, token_id: int, now: float) -> None:
        """One token and nothing else, at ``now``; otherwise as ``on_delta``."""

    def on_tokens(
        self, start_index: int, token_ids: list[int], now: float, num_drafts: int
    ) -> None:
        """The same of several, of a step that verified ``num_drafts``."""

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        """News of this request, in order; after a broken stream some of it for the second time."""

    def on_lost(self, error: TandemError) -> None:
        """No more deltas will come."""


class ReplacedError(PeerLostError):
    """Another life answers where this one was."""


class FrameStream:
    """The stream of one life of one decode rank."""

    def __init__(
        self,
        member: Member,
        stub: DecodeStub,
        router_id: str,
        *,
        row_ids: Iterator[int],
        resume_timeout_s: float,
        on_load: Callable[[WorkerKey, WorkerLoad], None],
        on_loss: Callable[[WorkerKey, str], None],
    ) -> None:
        """``resume_timeout_s``: how long requests wait for a broken stream to stand again.

        ``row_ids`` are above 0, and nothing else of the router process gets one of them.
        """
        self.key = member.key
        self._address = member.address
        self._stub = stub
        self._router_id = router_id
        self._resume_timeout_s = resume_timeout_s
        self._on_load = on_load
        self._on_loss = on_loss
        self._sinks: dict[str, TokenSink] = {}
        self._loop = asyncio.get_running_loop()
        self._rows = RowSinks(row_ids, self._loop.time, self._not_understood)
        self._stands_since: float | None = None
        self._num_silent = 0
        self._num_failures = 0
        """Attempts to connect in a row that brought no steady stream."""
        self._give_up_timer: asyncio.TimerHandle | None = None
        """Runs while the stream is broken and requests wait for it."""
        self.num_breaks = 0
        self._waiters: list[asyncio.Future[None]] = []
        """Who waits for the outcome of the present attempt to connect."""
        self._task = self._loop.create_task(
            self._run(), name=f"frames-{member.key}", context=without_trace()
        )
        self._task.add_done_callback(tell_failure)

    @property
    def num_attached(self) -> int:
        """Requests that wait for deltas."""
        return len(self._sinks)

    @property
    def stands(self) -> bool:
        """Whether deltas can arrive now."""
        return self._stands_since is not None

    async def standing(self) -> None:
        """Wait until the stream stands: no delta of a request reserved from now on is missed.

        Raises:
            PeerLostError: the present attempt to connect fails, or takes more than 5 s.
        """
        if self.stands:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(STANDING_TIMEOUT_S):
                await waiter
        except TimeoutError:
            raise self._unreachable("no answer") from None
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def attach(self, request_id: str, sink: TokenSink) -> int:
        """Send the news of ``request_id`` to ``sink``; returns what rows are to call it."""
        self._sinks[request_id] = sink
        return self._rows.attach(request_id, sink)

    def detach(self, request_id: str) -> None:
        """Send them no more; later deltas are dropped."""
        self._rows.detach(request_id)
        self._sinks.pop(request_id, None)

    def stop(self) -> None:
        """Make no further call; ``close`` has to follow."""
        self._task.cancel()

    async def close(self, reason: str) -> None:
        """End the stream; requests that still wait fail with ``reason``."""
        self.stop()
        await asyncio.wait({self._task})
        self._stop_timer()
        self._fail_waiters(reason)
        self._give_up(reason)

    async def _run(self) -> None:
        """Open the stream again and again, whatever breaks it; until cancelled."""
        while True:
            try:
                with map_rpc_errors(f"decode {self.key}"):
                    await self._read()
                error: Exception = PeerLostError("the worker ended the stream")
            except TandemError as failure:
                error = failure
            except Exception as failure:
                logger.exception("a stream of tokens failed worker=%s", self.key)
                error = failure
            forget_frames(error)
            self._note_break(error)
            await asyncio.sleep(self._delay_s())

    async def _read(self) -> None:
        resume = [
            decode_pb2.ResumePoint(request_id=request_id, next_index=next_index)
            for request_id, sink in self._sinks.items()
            if (next_index := sink.next_index) is not None
        ]
        request = decode_pb2.FramesRequest(router_id=self._router_id, resume=resume)
        call = self._stub.Frames(request)
        self._num_silent = 0
        self._listen_later(call)
        try:
            async for frame in call:
                self._num_silent = 0
                epoch = frame.decode.epoch
                if epoch not in (0, self.key.epoch):
                    raise ReplacedError(f"decode {self.key} was replaced behind {self._address}")
                if not self.stands:
                    self._stand(len(resume))
                self._deliver(frame)
        finally:
            self._listening.cancel()
            call.cancel()

    def _listen_later(self, call: FramesCall) -> None:
        self._listening = self._loop.call_later(LISTEN_S, self._listen, call)

    def _listen(self, call: FramesCall) -> None:
        """Break a stream of which nothing comes."""
        self._num_silent += 1
        if self._num_silent <= MAX_SILENT:
            self._listen_later(call)
            return
        seconds = self._num_silent * LISTEN_S
        logger.warning("a stream of tokens is silent worker=%s seconds=%g", self.key, seconds)
        call.cancel()

    def _stand(self, num_resumed: int) -> None:
        self._stands_since = self._loop.time()
        self._stop_timer()
        if num_resumed:
            logger.info("a stream of tokens goes on worker=%s requests=%d", self.key, num_resumed)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _deliver(self, frame: decode_pb2.Frame) -> None:
        if frame.HasField("rows"):
            self._rows.deliver(frame.rows)
        for delta in frame.deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            try:
                sink.on_delta(delta)
            except Exception as error:  # of this request alone
                self._not_understood(delta.request_id, error)
        if frame.HasField("load"):
            self._on_load(self.key, load_from_proto(frame.load))

    def _not_understood(self, request_id: str, error: Exception) -> None:
        logger.error("a delta was not understood request_id=%s", request_id, exc_info=error)
        self._lose(request_id, as_tandem_error(error))

    def _note_break(self, error: Exception) -> None:
        """The stream broke, or did not come to stand."""
        reason = as_tandem_error(error).message
        stood_since, self._stands_since = self._stands_since, None
        if stood_since is None:
            self._num_failures += 1
        else:
            is_steady = self._loop.time() - stood_since >= STEADY_S
            self._num_failures = 0 if is_steady else self._num_failures + 1
            self.num_breaks += 1
            text = "a stream of tokens broke worker=%s requests=%d reason=%r"
            logger.warning(text, self.key, len(self._sinks), reason)
            self._start_timer(reason)
        if self._num_failures == 1:  # one that stands again at once was no loss
            self._on_loss(self.key, reason)
        self._fail_waiters(reason)
        if self._num_failures >= MAX_FAILURES or isinstance(error, ReplacedError):
            self._give_up(reason)

    def _delay_s(self) -> float:
        if not self._num_failures:
            return 0.0
        return min(RECONNECT_FIRST_S * 2.0 ** min(self._num_failures - 1, 10), RECONNECT_MAX_S)

    def _start_timer(self, reason: str) -> None:
        if self._give_up_timer is None:
            text = f"{reason}; no new stream within {self._resume_timeout_s:g} s"
            text += " (router.resume_timeout_s)"
            self._give_up_timer = self._loop.call_later(self._resume_timeout_s, self._give_up, text)

    def _stop_timer(self) -> None:
        if self._give_up_timer is not None:
            self._give_up_timer.cancel()
            self._give_up_timer = None

    def _fail_waiters(self, reason: str) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._unreachable(reason))

    def _give_up(self, reason: str) -> None:
        """Tell all requests of the stream that it is lost."""
        for request_id in list(self._sinks):
            text = f"the tokens of decode {self.key} stopped: {reason}"
            self._lose(request_id, PeerLostError(text))

    def _lose(self, request_id: str, error: TandemError) -> None:
        self._rows.detach(request_id)
        sink = self._sinks.pop(request_id)
        try:
            sink.on_lost(error)
        except Exception:  # the others have to hear of it all the same
            logger.exception("a loss was not understood request_id=%s", request_id)

    def _unreachable(self, reason: str) -> PeerLostError:
        return PeerLostError(f"decode {self.key} at {self._address} cannot be reached: {reason}")


class FrameStreams:
    """A stream for every decode rank of the pool, standing before the first request needs it."""

    def __init__(
        self, pool: PoolView, clients: WorkerClients, router_id: str, *, resume_timeout_s: float
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._router_id = router_id
        self._resume_timeout_s = resume_timeout_s
        self._streams: dict[WorkerKey, FrameStream] = {}
        self._row_ids = itertools.count(1)
        """Of all streams: one that is opened anew may hear of the requests of the one before."""
        self._closing = BackgroundTasks()

    def stream(self, member: Member) -> FrameStream:
        """The stream of ``member``, opened where there is none."""
        stream = self._streams.get(member.key)
        if stream is None:
            stream = FrameStream(
                member,
                self._clients.decode(member),
                self._router_id,
                row_ids=self._row_ids,
                resume_timeout_s=self._resume_timeout_s,
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
            in_use = stream.num_attached and stream.stands
            if key not in members and (replaced or not in_use):
                del self._streams[key]
                reason = "it was restarted" if replaced else "it left the pool"
                stream.stop()  # at once: its channel is closed next
                self._closing.start(stream.close(reason), name=f"close-frames-{key}")

    def keys_in_use(self) -> set[WorkerKey]:
        """Decode ranks whose stream is open."""
        return set(self._streams)

    async def close(self) -> None:
        """End all streams."""
        streams = list(self._streams.values())
        self._streams.clear()
        await asyncio.gather(*(stream.close("the router is shutting down") for stream in streams))
        await self._closing.settle()
