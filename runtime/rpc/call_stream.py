"""Calls of one peer on one connection of our own, many in a message; `call_server` is its other
end.

A unary call of gRPC costs this side alone a fifth of a millisecond of a core: headers, and the wake
of two threads. Here whatever begins in one turn of the event loop, or while the peer does not keep
up, is one message. A call is what a unary one is: it fails as that would, with gRPC's errors;
cancelling it cancels it there; when the connection breaks all of its calls have failed. What is
long still has a call of its own: it holds up nobody, and is refused alone where it is too large. So
has all that is for a peer that announces no such port, or does not accept us there. See
docs/adr/0025-calls.md.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from runtime.background import BackgroundTasks, tell_failure
from runtime.logging import get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.pb import calls_pb2
from runtime.rpc.call_connection import CallConnection, greeting
from runtime.rpc.grpc_calls import MAX_MESSAGE_BYTES
from runtime.trace.context import TraceContext, current_trace, use_trace, without_trace

logger = get_logger(__name__)

MAX_CARRIED_BYTES = 64 * 2**10
"""Of a request; a longer one has a call of its own."""
MAX_BATCH_BYTES = 2**20
"""Of the requests of a message, about: far below what workers take (`WORKER_LIMITS`)."""
MAX_BATCH_CALLS = 16_384
"""In a message, cancels among them."""
CONNECT_S = 5.0
"""TCP and TLS to a peer; and then its word that it takes calls."""
ALONE_S = 10.0
"""How long each call is one of its own where no connection could be made."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

ResponseT = TypeVar("ResponseT")


@dataclass(frozen=True, slots=True)
class Method(Generic[ResponseT]):
    """A unary method that can be carried."""

    name: str
    """As the peer's service has it."""
    parse: Callable[[bytes], ResponseT]
    """The response's ``FromString``."""
    alone: Callable[..., Any]
    """The method of the stub, for a call of its own."""


class StreamCall(asyncio.Future[ResponseT]):
    """One call; its result is the response. Cancelling it, as by who awaits it, cancels it there.

    Fails with ``grpc.aio.AioRpcError`` or ``grpc.aio.UsageError``; is cancelled where the
    connection was closed under it.
    """

    def __init__(
        self, stream: CallStream, number: int, method: Method[ResponseT], request: Message
    ) -> None:
        super().__init__(loop=stream.loop)
        self.number = number
        self.method = method
        self.trace: TraceContext | None = current_trace()
        self.request = request
        self.timer: asyncio.TimerHandle | None = None
        self.answered = 0.0
        """When its answer was read, on the monotonic clock; 0: it was not."""
        self.alone: Any = None
        """The call of gRPC, where it has one of its own."""
        self._stream = stream

    def cancel(self, msg: Any | None = None) -> bool:
        """End it; the peer hears of it."""
        if not super().cancel(msg):
            return False
        self._stream.drop(self)
        return True

    def take(self, response: bytes) -> None:
        """It was answered."""
        self.answered = time.monotonic()
        try:
            self.set_result(self.method.parse(response))
        except Exception as error:
            self.set_exception(error)

    def lose(self, error: BaseException | None) -> None:
        """It failed; None: the connection was closed."""
        if self.timer is not None:
            self.timer.cancel()
        if self.done():
            return
        if error is None:
            super().cancel()
        else:
            self.set_exception(error)


class CallStream:
    """The connection to one peer, opened with the first call and anew after each break.

    One event loop owns it.
    """

    def __init__(self, address: str, credentials: Credentials, to: Role | None = None) -> None:
        """``address``: "host:port" that the peer announces; empty: it takes single calls only.

        ``to`` is the peer's role; None for ``credentials`` of no role.
        """
        self.loop = asyncio.get_running_loop()
        self._address = address
        self._credentials = credentials
        self._to = to
        self._number = 0
        self._pending: dict[int, StreamCall[Any]] = {}
        """Begun and not answered, on the connection."""
        self._unsent: dict[int, tuple[StreamCall[Any], bytes] | None] = {}
        """By number, each with its message; None, under a negative number: a cancel."""
        self._is_sending = False
        """Whether what is unsent goes out in the next turn of the loop."""
        self._connection: CallConnection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_accepted = False
        """Whether the peer takes calls on the connection; before, it is sent none."""
        self._patience: asyncio.TimerHandle | None = None
        """How long it may take to say so."""
        self._refusal: tuple[grpc.StatusCode, str] | None = None
        """What the peer said of the whole connection."""
        self._alone_until = math.inf if not address else 0.0
        """Until then each call is one of its own, on the loop's clock."""
        self._alone = BackgroundTasks()

    def start(
        self, method: Method[ResponseT], request: Message, timeout: float | None = None
    ) -> StreamCall[ResponseT]:
        """Begin a call; after ``timeout`` seconds it fails with DEADLINE_EXCEEDED."""
        self._number += 1
        call = StreamCall(self, self._number, method, request)
        data = request.SerializeToString()
        if timeout is not None:
            call.timer = self.loop.call_later(timeout, self._time_out, call)
        if len(data) > MAX_CARRIED_BYTES or self._alone_until > self.loop.time():
            self._start_alone(call)
            return call
        self._pending[call.number] = call
        self._unsent[call.number] = call, data
        self._send_soon()
        return call

    def drop(self, call: StreamCall[Any]) -> None:
        """Nobody waits for ``call`` any more: tell the peer, if it knows of it."""
        if call.timer is not None:
            call.timer.cancel()
        if call.alone is not None:
            call.alone.cancel()
        if self._pending.pop(call.number, None) is None:
            return
        if self._unsent.pop(call.number, None) is None:
            self._unsent[-call.number] = None
            self._send_soon()

    async def close(self) -> None:
        """End the connection; what is under way on it is cancelled.

        Later calls fail as those of a closed channel do, which is to be closed behind this.
        """
        self._alone_until = math.inf
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        self._fail_all(lambda: None)
        if self._connection is not None:
            self._connection.abort("closed")
        self._connection = None

    def opened(self, connection: CallConnection) -> None:
        """There is a connection: see `ConnectionOwner`."""
        self._connection = connection
        self._is_accepted = False
        text = f"not accepted in {CONNECT_S:g} s"
        self._patience = self.loop.call_later(CONNECT_S, connection.abort, text)
        connection.send(greeting(self._credentials.shown_to(self._to)))

    def take(self, message: bytes) -> None:
        """Answers came: see `ConnectionOwner`."""
        try:
            batch = calls_pb2.AnswerBatch.FromString(message)
        except DecodeError as error:
            assert self._connection is not None
            self._connection.abort(f"not our protocol: {error}")
            return
        for answer in batch.answers:
            self._take(answer)

    def writable(self) -> None:
        """The peer keeps up again: see `ConnectionOwner`."""
        self._send_soon()

    def lost(self, reason: str) -> None:
        """The connection is over, and so are its calls: see `ConnectionOwner`."""
        self._be_patient_no_more()
        if self._connection is None:
            return  # we closed it
        self._connection = None
        if not self._is_accepted and self._refusal is None:
            self._go_alone(reason)
            return
        code, details = self._refusal or (grpc.StatusCode.UNAVAILABLE, reason)
        self._fail_all(lambda: _error(code, details))  # a traceback for each

    def _time_out(self, call: StreamCall[Any]) -> None:
        if not call.done():
            call.set_exception(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self.drop(call)

    def _send_soon(self) -> None:
        if self._connection is None:
            if self._opening is None:
                self._opening = self.loop.create_task(
                    self._open(), name="calls", context=without_trace()
                )
                self._opening.add_done_callback(tell_failure)
        elif not self._is_sending:
            self._is_sending = True
            self.loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_sending = False
        connection = self._connection
        if connection is None or not self._is_accepted:
            return
        while self._unsent and connection.is_writable:
            connection.send(self._next_batch().SerializeToString())

    async def _open(self) -> None:
        self._refusal = None
        try:
            host, _, port = self._address.rpartition(":")
            tls = self._credentials.client_ssl_context()
            async with asyncio.timeout(CONNECT_S):
                await self.loop.create_connection(
                    lambda: CallConnection(self, MAX_MESSAGE_BYTES),
                    host.strip("[]"),
                    int(port),
                    ssl=tls,
                )
        except Exception as error:  # of TCP, of TLS, of its files
            if self._connection is None:  # else its end is told, as it was opened
                self._go_alone(str(error) or f"no connection in {CONNECT_S:g} s")
        finally:
            self._opening = None

    def _next_batch(self) -> calls_pb2.CallBatch:
        unsent = self._unsent
        batch, num_bytes = calls_pb2.CallBatch(), 0
        while unsent and num_bytes < MAX_BATCH_BYTES and len(batch.calls) < MAX_BATCH_CALLS:
            number = next(iter(unsent))
            begun = unsent.pop(number)
            if begun is None:
                batch.calls.add(number=-number)
                continue
            call, data = begun
            num_bytes += len(data)
            carried = batch.calls.add(number=number, method=call.method.name, request=data)
            if call.trace is not None:
                carried.traceparent = call.trace.header
                carried.tracestate = call.trace.state
        return batch

    def _take(self, answer: calls_pb2.CarriedAnswer) -> None:
        if not answer.number:
            self._judged(answer)
            return
        call = self._pending.pop(answer.number, None)
        if call is None:
            return  # cancelled meanwhile
        if call.timer is not None:
            call.timer.cancel()
        if answer.status_code:
            call.lose(_error(_code(answer.status_code), answer.details))
        else:
            call.take(answer.response)

    def _be_patient_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _judged(self, answer: calls_pb2.CarriedAnswer) -> None:
        self._be_patient_no_more()
        if answer.status_code:
            self._refusal = _code(answer.status_code), answer.details
            return
        self._is_accepted = True
        self._send_soon()

    def _fail_all(self, error_of: Callable[[], BaseException | None]) -> None:
        pending, self._pending = self._pending, {}
        self._unsent.clear()
        for call in pending.values():
            call.lose(error_of())

    def _go_alone(self, reason: str) -> None:
        """Nobody at the announced address takes calls, and so nobody has seen any of them."""
        logger.warning("calls go by themselves for a while address=%s: %s", self._address, reason)
        self._alone_until = self.loop.time() + ALONE_S
        pending, self._pending = self._pending, {}
        self._unsent.clear()
        for call in pending.values():
            self._start_alone(call)

    def _start_alone(self, call: StreamCall[Any]) -> None:
        self._alone.start(self._follow(call), name="call")

    async def _follow(self, call: StreamCall[Any]) -> None:
        """Make ``call`` a call of its own."""
        if call.done():
            return
        try:
            with use_trace(call.trace):
                call.alone = call.method.alone(call.request)
            response = await call.alone
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            call.lose(error)
        except asyncio.CancelledError:
            call.lose(None)
        else:
            if call.timer is not None:
                call.timer.cancel()
            if not call.done():
                call.answered = time.monotonic()
                call.set_result(response)


def _code(value: int) -> grpc.StatusCode:
    return _STATUS_CODES.get(value, grpc.StatusCode.UNKNOWN)


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details=details, debug_error_string=None)
