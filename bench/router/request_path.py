"""What the router costs: streamed tokens and requests per second of one core, and added TTFT.

Run ``python -m bench.router.request_path``; prints one JSON object. The router is the real process;
behind it stand workers that compute nothing (``bench.router.workers``), so all time is the router's
or the wire's. "Per core" is work divided by the router process's CPU seconds: it holds whatever
else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deploy.checks import resolve_config
from deploy.ports import free_port
from runtime.config import ClusterConfig
from runtime.config_file import SECRET_VARIABLE, dump_config

HOST = "127.0.0.1"
PROMPT = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
READY_S = 20.0
_EVENT = b"data: {"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Result of one run of concurrent streams."""

    num_streams: int
    output_tokens: int
    wall_tokens_per_s: float
    tokens_per_core_s: float
    """Output tokens per CPU second of the router."""
    router_cpu_share: float
    events_per_token: float
    """Below 1: the router was behind and sent several tokens together."""
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Result of one run of short requests."""

    concurrency: int
    max_tokens: int
    stream: bool
    num_requests: int
    wall_requests_per_s: float
    requests_per_core_s: float
    latency_p50_ms: float
    latency_p99_ms: float


class Router:
    """A running router with its workers."""

    def __init__(self, port: int, model: str, pid: int, log: Path) -> None:
        """``log`` is what router and workers wrote."""
        self.port = port
        self.model = model
        self.log = log
        self._pid = pid

    def cpu_s(self) -> float:
        """CPU seconds that the router has used, in nanoseconds' steps.

        The kernel's usual counters tick 100 times a second, which is nothing for a short run.
        """
        tasks = Path(f"/proc/{self._pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


@contextlib.contextmanager
def running_router(step_ms: float, *, context: int = 0, **section: int) -> Iterator[Router]:
    """Router and workers as processes of their own, ended on exit.

    Args:
        step_ms: of the decode rank.
        context: tokens that the model claims to hold; 0: those that it does.
        section: settings of the router.
    """
    built_in = ClusterConfig()
    changes = {"port": free_port(HOST), "control_port": 0, **section}
    router = dataclasses.replace(built_in.router, **changes)  # type: ignore[arg-type]
    config = resolve_config(dataclasses.replace(built_in, router=router))
    control = f"{HOST}:{config.router.control_port}"
    env = {**os.environ, SECRET_VARIABLE: "benchmark"}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder, contextlib.ExitStack() as s:
        if context:
            config = _with_context(config, Path(folder) / config.model.name, context)
        path = Path(folder) / "cluster.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        log = s.enter_context((Path(folder) / "log").open("w+b"))
        router_process = s.enter_context(_process(log, env, "router", "--config", str(path)))
        options = ["--control", control, "--model", config.model.name, "--step-ms", str(step_ms)]
        options += ["--max-model-len", str(context or 4096)]
        s.enter_context(_process(log, env, "bench.router.workers", *options))
        try:
            _wait_ready(config.router.port)
        except TimeoutError:
            log.seek(0)
            raise RuntimeError(f"not ready:\n{log.read().decode()}") from None
        yield Router(config.router.port, config.model.name, router_process.pid, Path(log.name))


def _with_context(config: ClusterConfig, folder: Path, context: int) -> ClusterConfig:
    """``config`` with a copy of its model, without weights, that claims another context."""
    shutil.copytree(config.model.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    shape = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**shape, "max_position_embeddings": context}), encoding="utf-8")
    model = dataclasses.replace(config.model, path=str(folder))
    return dataclasses.replace(config, model=model)


@contextlib.contextmanager
def _process(
    log: IO[bytes], env: dict[str, str], module: str, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, env=env, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _wait_ready(port: int) -> None:
    async def wait() -> None:
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(
                        urllib.request.urlopen, f"http://{HOST}:{port}/ready", timeout=5
                    )
                    return
                await asyncio.sleep(0.1)

    asyncio.run(wait())


async def post(router: Router, body: dict[str, object]) -> AsyncIterator[tuple[float, bytes]]:
    """Send one request over a connection of its own; (event-loop time, bytes) as they arrive."""
    loop = asyncio.get_running_loop()
    content = json.dumps({"model": router.model, "ignore_eos": True, **body}).encode()
    reader, writer = await asyncio.open_connection(HOST, router.port, limit=2**20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    try:
        while data := await reader.read(2**16):
            yield loop.time(), data
    finally:
        writer.close()


async def one_stream(router: Router, max_tokens: int) -> tuple[float, int]:
    """(seconds to the first event, number of events with text) of one stream."""
    began = asyncio.get_running_loop().time()
    first_at = 0.0
    data = b""
    async for now, part in post(router, _body(max_tokens, stream=True)):
        data += part
        if not first_at and _EVENT in data:
            first_at = now
    if not data.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in data:
        raise RuntimeError(f"a stream failed: {data[-500:]!r}")
    return first_at - began, data.count(_EVENT) - 1  # the finish reason has an event of its own


def _body(max_tokens: int, *, stream: bool) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "stream": stream}


async def measure_streams(router: Router, num_streams: int, max_tokens: int) -> Streams:
    """Run ``num_streams`` at once, all to their end."""
    loop = asyncio.get_running_loop()
    cpu_s, began = router.cpu_s(), loop.time()
    results = await asyncio.gather(*(one_stream(router, max_tokens) for _ in range(num_streams)))
    cpu_s, wall_s = router.cpu_s() - cpu_s, loop.time() - began
    tokens = num_streams * max_tokens
    ttft_ms = [1000 * ttft for ttft, _ in results]
    return Streams(
        num_streams=num_streams,
        output_tokens=tokens,
        wall_tokens_per_s=round(tokens / wall_s),
        tokens_per_core_s=round(tokens / cpu_s),
        router_cpu_share=round(cpu_s / wall_s, 3),
        events_per_token=round(sum(events for _, events in results) / tokens, 3),
        ttft_p50_ms=round(percentile(ttft_ms, 50), 2),
        ttft_p99_ms=round(percentile(ttft_ms, 99), 2),
    )


async def measure_requests(
    router: Router, *, concurrency: int, num_requests: int, max_tokens: int, stream: bool
) -> Requests:
    """Run short requests, ``concurrency`` at a time."""
    loop = asyncio.get_running_loop()
    latencies_ms: list[float] = []
    left = iter(range(num_requests))

    async def client() -> None:
        for _ in left:
            started = loop.time()
            data = b"".join(
                [part async for _, part in post(router, _body(max_tokens, stream=stream))]
            )
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a request failed: {data[:500]!r}")
            latencies_ms.append(1000 * (loop.time() - started))

    cpu_s, began = router.cpu_s(), loop.time()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    cpu_s, wall_s = router.cpu_s() - cpu_s, loop.time() - began
    return Requests(
        concurrency=concurrency,
        max_tokens=max_tokens,
        stream=stream,
        num_requests=num_requests,
        wall_requests_per_s=round(num_requests / wall_s),
        requests_per_core_s=round(num_requests / cpu_s),
        latency_p50_ms=round(percentile(latencies_ms, 50), 2),
        latency_p99_ms=round(percentile(latencies_ms, 99), 2),
    )


def percentile(values: list[float], percent: int) -> float:
    """The ``percent``-th percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


async def measure_all(router: Router, options: argparse.Namespace) -> dict[str, object]:
    """Every part, one after the other."""
    await measure_requests(router, concurrency=4, num_requests=40, max_tokens=4, stream=True)
    alone = [await one_stream(router, 1) for _ in range(options.requests)]
    ttft_ms = [1000 * ttft for ttft, _ in alone]
    streams = [
        dataclasses.asdict(await measure_streams(router, number, options.tokens))
        for number in options.streams
    ]
    short = [
        dataclasses.asdict(
            await measure_requests(
                router,
                concurrency=32,
                num_requests=4 * options.requests,
                max_tokens=1,
                stream=stream,
            )
        )
        for stream in (False, True)
    ]
    return {
        "added_ttft_p50_ms": round(percentile(ttft_ms, 50), 2),
        "added_ttft_p99_ms": round(percentile(ttft_ms, 99), 2),
        "streams": streams,
        "short_requests": short,
        "step_ms": options.step_ms,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of one stream")
    parser.add_argument("--requests", type=int, default=300, help="requests for the added TTFT")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the decode rank")
    options = parser.parse_args()
    # All streams at once: what is measured is the router, not its queue.
    most = max(1024, *options.streams)
    with running_router(options.step_ms, max_concurrent_requests=most) as router:
        print(json.dumps(asyncio.run(measure_all(router, options)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
