"""The load of ``bench.router.request_path``: a client that costs little, and what it measures.

Every client keeps its connection, as those behind a balancer do. It counts events and reads no
JSON: on a small machine a client that does is what one measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
PROMPT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
_EVENT = b"data: {"
_END_OF_CHUNKS = b"0\r\n\r\n"


class Router:
    """A running router with its workers."""

    def __init__(
        self, port: int, model: str, pid: int, log: Path, stamps: Path | None = None
    ) -> None:
        """``log`` is what router and workers wrote, ``stamps`` when workers had each request."""
        self.port = port
        self.model = model
        self.log = log
        self.stamps = stamps
        self._pid = pid

    def cpu_s(self) -> float:
        """CPU seconds that the router has used."""
        return self.times_s()[0]

    def times_s(self) -> tuple[float, float]:
        """(on a core, waiting for one) of all threads of the router, in nanoseconds' steps.

        The kernel's usual counters tick 100 times a second, which is nothing for a short run.
        """
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        rows = [(task / "schedstat").read_text().split() for task in tasks]
        return sum(int(row[0]) for row in rows) / 1e9, sum(int(row[1]) for row in rows) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Result of one run of concurrent streams."""

    num_streams: int
    output_tokens: int
    wall_tokens_per_s: float
    tokens_per_core_s: float
    """Output tokens per CPU second of the router."""
    cpu_us_per_chunk: float
    """CPU microseconds of the router for each event with text, requests' beginnings included."""
    router_cpu_share: float
    events_per_token: float
    """Below 1: the router was behind and sent several tokens together."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Result of one run of short requests."""

    load: str
    max_tokens: int
    stream: bool
    num_requests: int
    wall_requests_per_s: float
    requests_per_core_s: float
    ttft_p50_ms: float
    """To the first bytes of the answer, which is the first token's event in a stream."""
    ttft_p99_ms: float
    load_average: float


class Answer:
    """What came of one answer so far; its moments are on the machine's monotonic clock."""

    def __init__(self, sent_at: float, done: asyncio.Future[None], *, keeps: bool) -> None:
        """``keeps``: all of it, for who wants to read it."""
        self.sent_at = sent_at
        self.first_at = 0.0
        self.num_events = 0
        self.kept = b""
        self._keeps = keeps
        self.head = b""
        self.has_head = False
        self.num_missing: int | None = None
        """Bytes of a body with a length; None: chunks, until their end."""
        self.tail = b""
        self.done = done

    @property
    def ttft_s(self) -> float:
        """To the first bytes."""
        return self.first_at - self.sent_at

    def add(self, data: bytes) -> bool:
        """Whether the answer is whole with ``data``.

        Raises:
            RuntimeError: it is an error.
        """
        if not self.has_head:
            data = self._read_head(self.head + data)
        if self.num_missing is not None:
            self.num_missing -= len(data)
            return self.num_missing <= 0
        if self._keeps:
            self.kept += data
        data = self.tail + data
        self.num_events += data.count(_EVENT)
        # A mark that is cut in two is found with the next bytes, a whole one not again.
        self.tail = data[-(len(_EVENT) - 1) :]
        return data.endswith(_END_OF_CHUNKS)

    def _read_head(self, data: bytes) -> bytes:
        """What follows the headers, if anything."""
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            self.head = data
            return b""
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {data[:500]!r}")
        for line in head.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                self.num_missing = int(value)
        self.has_head = True
        return rest


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None

    @classmethod
    @asynccontextmanager
    async def connected(cls, router: Router) -> AsyncIterator[Client]:
        """Connected to ``router`` until left."""
        loop = asyncio.get_running_loop()
        transport, client = await loop.create_connection(lambda: cls(router), HOST, router.port)
        client._transport = transport
        try:
            yield client
        finally:
            transport.close()

    async def ask(
        self, body: dict[str, object], *, request_id: str = "", keeps: bool = False
    ) -> Answer:
        """One answer, which it ``keeps`` where told so.

        Raises:
            RuntimeError: it is an error, or the connection ended before it did.
        """
        content = json.dumps({"model": self._router.model, "ignore_eos": True, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\n"
        if request_id:
            head += f"x-request-id: {request_id}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        assert self._transport is not None
        answer = Answer(time.monotonic(), self._loop.create_future(), keeps=keeps)
        self._answer = answer
        self._transport.write(head.encode() + content)
        await answer.done
        return answer

    def data_received(self, data: bytes) -> None:
        """Some of the answer."""
        answer = self._answer
        if answer is None or answer.done.done():
            return
        answer.first_at = answer.first_at or time.monotonic()
        try:
            if answer.add(data):
                answer.done.set_result(None)
        except RuntimeError as error:
            answer.done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The router hung up."""
        if self._answer is not None and not self._answer.done.done():
            self._answer.done.set_exception(RuntimeError(f"the connection ended: {exc}"))


def body_of(max_tokens: int, *, stream: bool) -> dict[str, object]:
    """A request for ``max_tokens``."""
    return {"prompt": PROMPT, "max_tokens": max_tokens, "stream": stream}


async def measure_streams(router: Router, num_streams: int, max_tokens: int) -> Streams:
    """Run ``num_streams`` at once, all to their end."""

    async def one() -> Answer:
        async with Client.connected(router) as client:
            return await client.ask(body_of(max_tokens, stream=True))

    cpu_s, began = router.cpu_s(), time.perf_counter()
    answers = await asyncio.gather(*(one() for _ in range(num_streams)))
    cpu_s, wall_s = router.cpu_s() - cpu_s, time.perf_counter() - began
    tokens = num_streams * max_tokens
    events = sum(each.num_events - 1 for each in answers)  # a finish reason has one of its own
    ttft_ms = [1000 * each.ttft_s for each in answers]
    return Streams(
        num_streams=num_streams,
        output_tokens=tokens,
        wall_tokens_per_s=round(tokens / wall_s),
        tokens_per_core_s=round(tokens / cpu_s),
        cpu_us_per_chunk=round(1e6 * cpu_s / events, 2),
        router_cpu_share=round(cpu_s / wall_s, 3),
        events_per_token=round(events / tokens, 3),
        ttft_p50_ms=round(percentile(ttft_ms, 50), 2),
        ttft_p99_ms=round(percentile(ttft_ms, 99), 2),
        load_average=round(os.getloadavg()[0], 2),
    )


async def measure_requests(
    router: Router, *, concurrency: int, num_requests: int, max_tokens: int, stream: bool
) -> Requests:
    """Run short requests, ``concurrency`` at a time, as fast as they are answered."""
    left = iter(range(num_requests))
    ttft_s: list[float] = []

    async def client() -> None:
        async with Client.connected(router) as client:
            for _ in left:
                answer = await client.ask(body_of(max_tokens, stream=stream))
                ttft_s.append(answer.ttft_s)

    cpu_s, began = router.cpu_s(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    seconds = router.cpu_s() - cpu_s, time.perf_counter() - began
    return _requests(
        f"{concurrency} at a time", body_of(max_tokens, stream=stream), ttft_s, seconds
    )


async def measure_arrivals(
    router: Router, *, rate: float, num_requests: int, max_tokens: int
) -> Requests:
    """Run short streams that arrive ``rate`` a second, evenly, whatever became of earlier ones."""
    ttft_s: list[float] = []

    async def ask(client: Client, number: int) -> None:
        answer = await client.ask(body_of(max_tokens, stream=True))
        ttft_s.append(answer.ttft_s)

    cpu_s, began = router.cpu_s(), time.perf_counter()
    await arrive(router, rate, num_requests, ask)
    seconds = router.cpu_s() - cpu_s, time.perf_counter() - began
    return _requests(f"{rate:.0f} a second", body_of(max_tokens, stream=True), ttft_s, seconds)


async def arrive(
    router: Router, rate: float, num_requests: int, ask: Callable[[Client, int], Awaitable[None]]
) -> None:
    """Call ``ask`` with a free connection and a number, ``rate`` times a second."""
    began = time.perf_counter()
    arrivals = itertools.count()

    async def client() -> None:
        async with Client.connected(router) as client:
            while (number := next(arrivals)) < num_requests:
                due = began + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await ask(client, number)

    await asyncio.gather(*(client() for _ in range(64)))


def _requests(
    load: str, body: dict[str, object], ttft_s: list[float], seconds: tuple[float, float]
) -> Requests:
    """``seconds``: of the router's CPU, and of the clock."""
    cpu_s, wall_s = seconds
    return Requests(
        load=load,
        max_tokens=int(str(body["max_tokens"])),
        stream=bool(body["stream"]),
        num_requests=len(ttft_s),
        wall_requests_per_s=round(len(ttft_s) / wall_s),
        requests_per_core_s=round(len(ttft_s) / cpu_s),
        ttft_p50_ms=round(1000 * percentile(ttft_s, 50), 2),
        ttft_p99_ms=round(1000 * percentile(ttft_s, 99), 2),
        load_average=round(os.getloadavg()[0], 2),
    )


def percentile(values: list[float], percent: int) -> float:
    """The ``percent``-th percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
