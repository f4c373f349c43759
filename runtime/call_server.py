"""The peer's end of `runtime.call_stream`: unary methods of a service, called over one stream.

Each call is a task, as it would be on its own: with the trace of its request, and cancelled where
its caller cancels it, goes away, or the server ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from runtime.logging import get_logger
from runtime.pb import calls_pb2, calls_pb2_grpc
from runtime.rpc import MAX_MESSAGE_BYTES, WORKER_LIMITS
from runtime.trace import TraceContext, set_trace

logger = get_logger(__name__)

MAX_BATCH_BYTES = 2**20
"""Of the responses of a message, about."""
MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES - MAX_BATCH_BYTES - 1024
"""A longer one would end the stream, and with it all other calls."""

Context = grpc.aio.ServicerContext[calls_pb2.CallBatch, calls_pb2.AnswerBatch]


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


class CallServer(calls_pb2_grpc.CallsServicer):
    """Serves methods by their names."""

    def __init__(
        self,
        methods: Mapping[str, CarriedMethod],
        *,
        max_calls: int = WORKER_LIMITS.max_concurrent_rpcs,
    ) -> None:
        """``max_calls``: of one stream at once; one more is answered RESOURCE_EXHAUSTED."""
        self._methods = methods
        self._max_calls = max_calls

    async def Carry(
        self, batches: AsyncIterator[calls_pb2.CallBatch], context: Context
    ) -> AsyncIterator[calls_pb2.AnswerBatch]:
        """Answer the calls of one peer for as long as it is there."""
        calls = _Calls(self._methods, self._max_calls)
        reading = asyncio.create_task(calls.read(batches), name="calls")
        try:
            while (batch := await calls.answers()) is not None:
                yield batch
        finally:
            reading.cancel()
            await calls.cancel()
            await asyncio.gather(reading, return_exceptions=True)


class _Calls:
    """The calls of one stream."""

    def __init__(self, methods: Mapping[str, CarriedMethod], max_calls: int) -> None:
        self._methods = methods
        self._max_calls = max_calls
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._answers: list[calls_pb2.CarriedAnswer] = []
        self._news = asyncio.Event()
        self._is_read = False
        """Whether the peer begins no more of them."""

    async def read(self, batches: AsyncIterator[calls_pb2.CallBatch]) -> None:
        """Begin and cancel calls until the peer sends no more."""
        try:
            async for batch in batches:
                for call in batch.calls:
                    if call.method:
                        self._begin(call)
                    elif (task := self._tasks.get(call.number)) is not None:
                        task.cancel()
        finally:
            self._is_read = True
            self._news.set()

    async def answers(self) -> calls_pb2.AnswerBatch | None:
        """What was answered since the last time, as much as a message takes; None: it was all."""
        while not self._answers:
            if self._is_read and not self._tasks:
                return None
            self._news.clear()
            await self._news.wait()
        num_bytes = number = 0
        for answer in self._answers:
            number += 1
            num_bytes += len(answer.response)
            if num_bytes >= MAX_BATCH_BYTES:
                break
        batch = calls_pb2.AnswerBatch(answers=self._answers[:number])
        del self._answers[:number]
        return batch

    async def cancel(self) -> None:
        """Nobody waits for any of them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, call: calls_pb2.CarriedCall) -> None:
        if len(self._tasks) >= self._max_calls:
            text = f"{self._max_calls} calls are under way on one stream"
            self._fail(call.number, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._news.set()
            return
        task = asyncio.create_task(self._serve(call), name=call.method)
        self._tasks[call.number] = task
        task.add_done_callback(partial(self._ended, call.number))

    def _ended(self, number: int, _: asyncio.Task[None]) -> None:
        del self._tasks[number]
        self._news.set()

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

    def _fail(self, number: int, code: grpc.StatusCode, details: str) -> None:
        self._answers.append(
            calls_pb2.CarriedAnswer(number=number, status_code=code.value[0], details=details)
        )


def carry(server: grpc.aio.Server, **methods: CarriedMethod) -> None:
    """Serve ``methods`` on streams of ``server``, too."""
    calls_pb2_grpc.add_CallsServicer_to_server(CallServer(methods), server)
