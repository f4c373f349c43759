"""The peer's end of `call_stream`: unary methods of a service, called over one connection.

Each call is a task, as it would be on its own: with the trace of its request, and cancelled where
its caller cancels it, goes away, or the server ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from runtime.logging import get_logger
from runtime.net.credentials import Credentials, Listen
from runtime.net.roles import Roles, refusal
from runtime.pb import calls_pb2
from runtime.rpc.call_connection import CallConnection
from runtime.rpc.call_listener import CallListener
from runtime.rpc.call_stream import MAX_BATCH_CALLS
from runtime.rpc.grpc_calls import MAX_MESSAGE_BYTES, WORKER_LIMITS, ServerLimits
from runtime.trace.context import TraceContext, set_trace

logger = get_logger(__name__)

MAX_BATCH_BYTES = 2**20
"""Of the responses of a message, about."""
MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - MAX_BATCH_BYTES - 1024
"""A longer one would end the connection, and with it all other calls."""


class _AbortedError(Exception):
    """A method has ended its call."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class CarriedContext:
    """What a method may ask of its call."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End this call, and no other."""
        raise _AbortedError(code, details)

    def time_remaining(self) -> float | None:
        """None: the caller cancels it when its time is over."""
        return None


@dataclass(frozen=True, slots=True)
class CarriedMethod:
    """A unary method of a service."""

    parse: Callable[[bytes], Message]
    """The request's ``FromString``."""
    handler: Callable[[Any, Any], Awaitable[Message]]
    service: str = ""
    """Whose it is: set by ``carry``."""


class CallServer:
    """Serves methods by their names, to whoever shows the cluster's secret."""

    def __init__(self, credentials: Credentials, limits: ServerLimits = WORKER_LIMITS) -> None:
        """Of ``limits``, the calls at once are those of one connection; one more is answered
        RESOURCE_EXHAUSTED.
        """
        self._limits = limits
        self._methods: dict[str, CarriedMethod] = {}
        self._listener = CallListener(credentials, self._welcome)
        self._callers: set[_Caller] = set()

    def carry(self, service: str, **methods: CarriedMethod) -> None:
        """Serve ``methods`` of ``service``, too."""
        self._methods |= {name: replace(one, service=service) for name, one in methods.items()}

    def start(self, listen: Listen, field: str = "--calls-port") -> int:
        """Listen where ``listen`` says; the port.

        Raises:
            ConfigError: the port is taken, and ``field`` names the setting it comes from; or a file
                of TLS cannot be used.
        """
        return self._listener.open(listen, field)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; what is under way after ``grace_s`` is cancelled."""
        await self._listener.close()
        await asyncio.gather(*(caller.stop(grace_s) for caller in self._callers))

    def _welcome(self, connection: CallConnection, roles: Roles) -> tuple[_Caller, int]:
        most = self._limits.max_concurrent_rpcs
        caller = _Caller(connection, self._methods, roles, most, on_end=self._callers.discard)
        self._callers.add(caller)
        return caller, self._limits.max_request_bytes


class _Caller:
    """The calls of one connection."""

    def __init__(
        self,
        connection: CallConnection,
        methods: Mapping[str, CarriedMethod],
        roles: Roles,
        max_calls: int,
        *,
        on_end: Callable[[_Caller], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._methods = methods
        self._roles = roles
        self._max_calls = max_calls
        self._on_end = on_end
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[calls_pb2.CarriedAnswer] = []
        self._is_sending = False
        """Whether the answers go out in the next turn of the loop."""
        self._is_stopping = False

    def opened(self, connection: CallConnection) -> None:
        """See `ConnectionOwner`; it stands already."""

    def take(self, message: bytes) -> None:
        """Begin and cancel calls."""
        try:
            batch = calls_pb2.CallBatch.FromString(message)
        except DecodeError as error:
            self._connection.abort(f"no calls: {error}")
            return
        if len(batch.calls) > MAX_BATCH_CALLS:
            self._connection.abort(f"a message of {len(batch.calls)} calls")
            return
        for call in batch.calls:
            if call.method and (call.number in self._tasks or not call.number):
                self._connection.abort(f"a second call of number {call.number}")
                return
            if call.method:
                self._begin(call)
            elif (task := self._tasks.get(call.number)) is not None:
                task.cancel()

    def writable(self) -> None:
        """Go on with what the caller had to take first."""
        self._connection.resume_reading()
        self._send()

    def lost(self, reason: str) -> None:
        """Nobody waits for any of them."""
        for task in self._tasks.values():
            task.cancel()
        self._on_end(self)

    async def stop(self, grace_s: float) -> None:
        """Begin no more; answer what ends by itself in ``grace_s``."""
        self._is_stopping = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=grace_s)
        self._send()
        self._connection.end("the worker ends")
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_sending = False
        while self._answers:
            if not self._connection.is_writable:
                self._connection.pause_reading()
                return
            self._connection.send(self._next_batch().SerializeToString())

    def _next_batch(self) -> calls_pb2.AnswerBatch:
        """What was answered since the last time, as much as a message takes."""
        num_bytes = number = 0
        for answer in self._answers:
            number += 1
            num_bytes += len(answer.response)
            if num_bytes >= MAX_BATCH_BYTES:
                break
        batch = calls_pb2.AnswerBatch(answers=self._answers[:number])
        del self._answers[:number]
        return batch

    def _begin(self, call: calls_pb2.CarriedCall) -> None:
        if self._is_stopping:
            self._fail(call.number, grpc.StatusCode.UNAVAILABLE, "the worker ends")
            return
        if len(self._tasks) >= self._max_calls:
            text = f"{self._max_calls} calls are under way on one connection"
            self._fail(call.number, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            return
        task = asyncio.create_task(self._serve(call), name=call.method)
        self._tasks[call.number] = task
        task.add_done_callback(partial(self._ended, call.number))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]

    async def _serve(self, call: calls_pb2.CarriedCall) -> None:
        number = call.number
        try:
            if call.traceparent:
                trace = TraceContext.parse(call.traceparent, call.tracestate)
                set_trace(None if trace is None else trace.child())
            self._answer(number, await self._response_of(call))
        except _AbortedError as error:
            self._fail(number, error.code, error.details)
        except Exception as error:
            logger.exception("a call failed method=%s", call.method)
            text = f"Unexpected {type(error)}: {error}"
            self._fail(number, grpc.StatusCode.UNKNOWN, text)

    async def _response_of(self, call: calls_pb2.CarriedCall) -> bytes:
        method = self._methods.get(call.method)
        if method is None:
            raise _AbortedError(grpc.StatusCode.UNIMPLEMENTED, f"{call.method}: no such method")
        if reason := refusal(method.service, call.method, self._roles):
            raise _AbortedError(grpc.StatusCode.PERMISSION_DENIED, reason)
        try:
            request = method.parse(call.request)
        except DecodeError as error:
            raise _AbortedError(grpc.StatusCode.INTERNAL, f"{call.method}: {error}") from error
        response = (await method.handler(request, CarriedContext())).SerializeToString()
        if len(response) > MAX_RESPONSE_BYTES:
            text = f"a response of {len(response)} bytes is larger than {MAX_RESPONSE_BYTES}"
            raise _AbortedError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        return response

    def _answer(self, number: int, response: bytes) -> None:
        self._answers.append(calls_pb2.CarriedAnswer(number=number, response=response))
        self._send_soon()

    def _fail(self, number: int, code: grpc.StatusCode, details: str) -> None:
        self._answers.append(
            calls_pb2.CarriedAnswer(number=number, status_code=code.value[0], details=details)
        )
        self._send_soon()
