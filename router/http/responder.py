"""Sends one answer: outputs of a run become pieces of text, pieces become bytes, bytes go out.

Nothing is sent before the first token or the first failure is known, so a failure has its HTTP
status; only a stream that waits longer than the keep-alive interval begins with comments. What
arrives in one turn of the event loop is one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import orjson
from aiohttp import web

from router.errors import as_tandem_error
from router.http import sse
from router.http.dialect import Dialect
from router.http.errors import failure_from
from router.http.response import Choice, ResponseFormat, ResponseInfo
from router.model_metrics import ModelMetrics
from router.requests.generation import Output
from router.requests.run import RequestRun
from runtime.errors import TandemError
from runtime.logging import get_logger

logger = get_logger(__name__)

COUNT_S = 0.5
"""Output tokens reach the counter so late at most: adding them one by one costs a lock each."""
TIMINGS_HEADER = "x-tandem-timings"


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
        self._dialect = dialect
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._error: TandemError | None = None
        self._num_open = len(info.choices)
        self._last_delivery = [0.0] * len(info.choices)
        self._num_uncounted = 0
        self._counted_at = self._loop.time()

    async def body(self) -> web.Response:
        """The whole answer at once."""
        try:
            while self._num_open:
                self._absorb(await self._run.mailbox.take())
                self._raise_failure()
        finally:
            self._count_tokens()
        headers = self._headers
        if self._info.wants_timings:
            headers[TIMINGS_HEADER] = orjson.dumps(self._info.timings()).decode()
        return web.Response(
            body=self._form.closing(), content_type="application/json", headers=headers
        )

    async def stream(self, request: web.Request, request_id: str) -> web.StreamResponse:
        """The answer as server-sent events; a failure before the first of them is raised."""
        response = web.StreamResponse(
            headers={**self._headers, **sse.HEADERS, "x-request-id": request_id}
        )
        take = self._run.mailbox.take
        self._wake_later()
        try:
            outputs = await take()
            data = self._absorb(outputs)
            self._raise_failure()
            await response.prepare(request)
            try:
                while True:
                    if not outputs:
                        data = sse.KEEP_ALIVE
                    if not self._num_open:
                        break
                    if data:
                        await response.write(data)
                    self._raise_failure()
                    outputs = await take()
                    data = self._absorb(outputs)
                data += self._form.closing()
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception as error:
                data = self._failure(error, request_id)
            await response.write(data + self._dialect.done)
            await response.write_eof()
        finally:
            self._timer.cancel()
            self._count_tokens()
        return response

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake_later(self) -> None:
        """Have ``take`` return empty-handed now and then."""

        def wake() -> None:
            self._run.mailbox.wake()
            self._wake_later()

        self._timer = self._loop.call_later(self._keep_alive_s, wake)

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
            self._measure(choice, output, now)
            piece = choice.text.feed(output.token_ids, output.logprobs, output.finish_reason)
            if piece is None:
                continue
            parts.append(self._form.piece(choice, piece))
            if piece.finish_reason is not None:
                self._end(choice, output, piece.finish_reason, now)
        return b"".join(parts)

    def _measure(self, choice: Choice, output: Output, now: float) -> None:
        metrics = self._metrics
        self._num_uncounted += len(output.token_ids)
        if now - self._counted_at >= COUNT_S:
            self._count_tokens()
            self._counted_at = now
        if output.first is not None:
            metrics.ttft.observe(now - choice.generation.timings.received)
            metrics.cached_tokens.inc(output.first.num_cached_tokens)
        elif output.token_ids:
            metrics.itl.observe(now - self._last_delivery[choice.index])
        self._last_delivery[choice.index] = now

    def _count_tokens(self) -> None:
        num_tokens, self._num_uncounted = self._num_uncounted, 0
        self._metrics.output_tokens.inc(num_tokens)

    def _end(self, choice: Choice, output: Output, reason: str, now: float) -> None:
        self._num_open -= 1
        generation = choice.generation
        generation.timings.ended = now
        self._metrics.choice_finished(
            reason,
            generation.timings.split(),
            num_tokens=generation.num_tokens,
            max_tokens=generation.sampling.max_tokens,
        )
        if output.finish_reason is None:  # a stop string: decode does not know yet
            self._run.stop(choice.index)
