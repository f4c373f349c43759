"""Sends one answer: outputs of a run become pieces of text, pieces become bytes, bytes go out.

Nothing is sent before the first token or the first failure is known, so a failure has its HTTP
status; only a stream that waits longer than the keep-alive interval begins with comments. What
arrives in one turn of the event loop is one write.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import orjson
from aiohttp import web

from router.errors import as_tandem_error
from router.http.apis.dialect import Dialect
from router.http.errors import failure_from
from router.http.openai.response import Choice, ResponseFormat, ResponseInfo, TextEvents
from router.http.wire import sse
from router.http.wire.flow import TextFlow
from router.http.wire.outlet import Outlet
from router.http.wire.reply import Reply
from router.metrics.model import ModelMetrics
from router.requests.generation import Output
from router.requests.run import RequestRun
from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.pb import prefill_pb2

logger = get_logger(__name__)

TIMINGS_HEADER = "x-tandem-timings"
_WHOLE = {"Content-Type": "application/json"}


class Responder:
    """The way of one run's outputs to the client."""

    def __init__(
        self,
        run: RequestRun,
        info: ResponseInfo,
        form: ResponseFormat,
        metrics: ModelMetrics,
        *,
        dialect: Dialect,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A comment is sent in a stream every ``keep_alive_s``; ``headers`` go with either form."""
        self._headers = dict(headers or {})
        self._run = run
        self._info = info
        self._form = form
        self._metrics = metrics
        self._deliveries = metrics.deliveries
        self._dialect = dialect
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._error: TandemError | None = None
        self._num_open = len(info.choices)
        self._last_delivery = [0.0] * len(info.choices)

    async def body(self, request_id: str) -> web.StreamResponse:
        """The whole answer at once."""
        await self._follow(None)
        self._raise_failure()
        headers = {**self._headers, **self._info.routing(), **_WHOLE, "x-request-id": request_id}
        if self._info.wants_timings:
            headers[TIMINGS_HEADER] = orjson.dumps(self._info.timings()).decode()
        return Reply(headers, self._form.closing())

    async def stream(self, request: web.Request, request_id: str) -> web.StreamResponse:
        """The answer as server-sent events; a failure before the first of them is raised."""
        mailbox = self._run.mailbox
        self._keep_alive_later(mailbox.wake)
        try:
            outputs = await mailbox.take()
            data = self._absorb(outputs) if outputs else sse.KEEP_ALIVE
            self._raise_failure()
            headers = {**self._headers, **self._info.routing(), **sse.HEADERS}
            response = Reply({**headers, "x-request-id": request_id})
            await response.prepare(request)
            try:
                if self._num_open:
                    await response.write(data)  # and the headers with it, even if it is empty
                    data = await self._follow(Outlet(request))
                if self._error is not None:
                    data += self._failure(self._error, request_id)
                else:
                    data += self._form.closing()
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception as error:
                data = self._failure(error, request_id)
            await response.write_eof(data + self._dialect.done)
        finally:
            self._timer.cancel()
        return response

    async def _follow(self, outlet: Outlet | None) -> bytes:
        """Take in all outputs as they come, and send them; returns what the last of them gave.

        Each turn of the event loop that brings some is one call of ``deliver``, and one write.
        Without room in ``outlet`` they wait in the mailbox; without ``outlet`` nothing is sent.
        """
        mailbox = self._run.mailbox
        last: asyncio.Future[bytes] = self._loop.create_future()

        def deliver() -> None:
            if last.done() or not (outlet is None or outlet.has_room):
                return
            try:
                data = self._absorb(mailbox.take_now())
                if not self._num_open or self._error is not None:
                    self._close_flows()  # another choice's next token would overtake `data`
                    last.set_result(data if outlet is None else outlet.take_back() + data)
                elif outlet is not None and data:
                    outlet.write(data)
            except Exception as error:
                last.set_exception(error)

        mailbox.listen(deliver, None if outlet is None else outlet.call_soon)
        if outlet is not None:
            self._open_flows(outlet)
            outlet.on_room(deliver)
            self._timer.cancel()
            self._keep_alive_later(partial(_keep_alive, outlet))
        try:
            return await last
        finally:
            mailbox.listen(None)
            self._close_flows()
            if outlet is not None:
                outlet.close()

    def _open_flows(self, outlet: Outlet) -> None:
        """Let plain text pass by the mailbox."""
        if not isinstance(self._form, TextEvents):
            return
        for choice in self._info.choices:
            event = self._form.text_event(choice)
            if event is not None:
                choice.generation.flow = TextFlow(
                    choice, event, outlet, self._deliveries, self._last_delivery
                )

    def _close_flows(self) -> None:
        for choice in self._info.choices:
            choice.generation.flow = None

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _keep_alive_later(self, keep_alive: Callable[[], None]) -> None:
        """Call ``keep_alive`` now and then."""

        def ring() -> None:
            keep_alive()
            self._keep_alive_later(keep_alive)

        self._timer = self._loop.call_later(self._keep_alive_s, ring)

    def _failure(self, error: Exception, request_id: str) -> bytes:
        """The event that tells of a failure after the headers are gone."""
        tandem_error = as_tandem_error(error)
        if tandem_error is not error:
            logger.exception("a stream failed request_id=%s", request_id)
        failure = failure_from(tandem_error)
        self._metrics.count_error(failure.label)
        logger.warning("stream ended by error request_id=%s error=%r", request_id, failure.message)
        return self._dialect.event_of(failure, request_id)

    def _absorb(self, outputs: Sequence[Output]) -> bytes:
        """Take in ``outputs`` up to a failure among them, and return what to send."""
        parts = []
        now = self._loop.time()
        for output in outputs:
            choice = self._info.choices[output.choice]
            if choice.text.finished:
                continue
            if output.error is not None:
                self._error = output.error
                break
            if output.first is not None:
                parts.append(self._form.opening(choice, output.first))
                self._measure_first(choice, output.first)
            elif output.token_ids:
                interval_s = now - self._last_delivery[choice.index]
                self._deliveries.add(len(output.token_ids), interval_s)
            self._last_delivery[choice.index] = now
            num_before = choice.text.num_tokens
            piece = choice.text.feed(output.token_ids, output.logprobs, output.finish_reason)
            if output.num_drafts:  # what stands behind a stop string is no output
                num_taken = choice.text.num_tokens - num_before
                choice.generation.drafts.add(output.num_drafts, num_taken - 1)
            if piece is None:
                continue
            parts.append(self._form.piece(choice, piece))
            if piece.finish_reason is not None:
                self._end(choice, output, piece.finish_reason)
        return b"".join(parts)

    def _measure_first(self, choice: Choice, first: prefill_pb2.FirstToken) -> None:
        self._deliveries.add(1, None)
        self._metrics.ttft.observe(time.monotonic() - choice.generation.timings.received)
        self._metrics.cached_tokens.inc(first.num_cached_tokens)

    def _end(self, choice: Choice, output: Output, reason: str) -> None:
        self._num_open -= 1
        generation = choice.generation
        generation.timings.ended = time.monotonic()
        split = generation.timings.split()
        self._metrics.choice_finished(
            reason,
            split,
            num_tokens=generation.num_tokens,
            max_tokens=generation.sampling.max_tokens,
        )
        self._metrics.tiers.finished(generation.standing, split, generation.num_tokens)
        if output.finish_reason is None:  # a stop string: decode does not know yet
            self._run.stop(choice.index)


def _keep_alive(outlet: Outlet) -> None:
    """Say that the stream lives, to a client that listens."""
    if outlet.has_room:
        outlet.write(sse.KEEP_ALIVE)
