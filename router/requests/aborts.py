"""Tells decode ranks that requests are over, in the background, until they have heard it.

What a rank is not told of decodes on to its last token, so a call that fails is repeated for as
long as the worker lives, within reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from router.metrics.model import ModelMetrics
from router.pool.members import Member, WorkerKey
from router.requests.clients import WorkerClients
from runtime.background import BackgroundTasks
from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.pb import decode_pb2
from runtime.rpc.grpc_calls import map_rpc_errors

logger = get_logger(__name__)

CALL_TIMEOUT_S = 5.0
TOTAL_S = 60.0
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0


class Aborts:
    """The calls under way. One event loop owns it."""

    def __init__(
        self,
        clients: WorkerClients,
        metrics: ModelMetrics,
        *,
        is_alive: Callable[[WorkerKey], bool],
        total_s: float = TOTAL_S,
    ) -> None:
        """``is_alive`` says whether a life of a worker may still be there."""
        self._clients = clients
        self._metrics = metrics
        self._is_alive = is_alive
        self._total_s = total_s
        self._tasks = BackgroundTasks()
        self._closing = asyncio.Event()

    @property
    def num_pending(self) -> int:
        """Aborts that nobody has heard yet."""
        return len(self._tasks)

    def send(self, decode: Member, worker_request_id: str, reason: str) -> None:
        """Tell ``decode`` that a request is over; idempotent there."""
        request = decode_pb2.AbortRequest(request_id=worker_request_id, reason=reason)
        work = self._until_heard(decode, request)
        self._tasks.start_for_request(work, name=f"abort-{worker_request_id}")

    async def end_without_ticket(self, decode: Member, worker_request_id: str) -> bool:
        """End a request that has no ticket yet, for a rank with room; whether that is certain."""
        request = decode_pb2.AbortRequest(
            request_id=worker_request_id,
            reason="another decode rank has room for it",
            only_without_ticket=True,
        )
        try:
            with map_rpc_errors(f"decode {decode.key}"):
                stub = self._clients.decode(decode)
                response = await stub.Abort(request, timeout=CALL_TIMEOUT_S)
        except TandemError:
            return False  # where the worker is lost, its frames say so
        return response.known

    async def close(self) -> None:
        """Wait for the calls under way; what waits to be repeated is tried once more."""
        self._closing.set()
        await self._tasks.settle()

    async def _until_heard(self, decode: Member, request: decode_pb2.AbortRequest) -> None:
        loop = asyncio.get_running_loop()
        until, delay_s = loop.time() + self._total_s, RETRY_FIRST_S
        while True:
            error = await self._call(decode, request)
            if error is None or not self._is_alive(decode.key):
                return
            if self._closing.is_set() or loop.time() + delay_s >= until:
                # The worker's own limit of time ends the request.
                self._metrics.lost_aborts.inc()
                text = "an abort was lost request_id=%s worker=%s error=%r"
                logger.warning(text, request.request_id, decode.key, error.message)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._closing.wait()
            delay_s = min(2 * delay_s, RETRY_MAX_S)

    async def _call(self, decode: Member, request: decode_pb2.AbortRequest) -> TandemError | None:
        """Why the worker did not answer; None where it did."""
        # The channel is looked up now: the one of before may be closed, its worker gone.
        stub = self._clients.decode(decode)
        try:
            with map_rpc_errors(f"decode {decode.key}"):
                await stub.Abort(request, timeout=CALL_TIMEOUT_S)
        except TandemError as error:
            return error
        return None
