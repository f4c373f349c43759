"""What honest clients feel of hostile ones: a real router under four attacks, beside an idle run.

Run ``python -m bench.router.hostile``; prints one table. The router is the real process, its
workers compute nothing (``bench.router.workers``), and each attack comes from a process of its own,
so that a slow answer is the router's and not the measuring client's. On few cores they share them
all the same: compare with the idle line of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.router.load import HOST, Router, percentile
from bench.router.running import running_router

BODY_BYTES = 8 * 2**20 - 1024
PROBE_S = 0.02
NUM_SILENT = 500
NUM_DRIPPING = 1000
DRIP_S = 3.0
NUM_BURST = 600
LEASE_LOST = "lease of a worker ran out"


@dataclass
class Felt:
    """What honest clients saw meanwhile."""

    health_ms: list[float] = field(default_factory=list)
    request_ms: list[float] = field(default_factory=list)
    num_failed: int = 0

    def row(self, name: str, note: str = "") -> str:
        """One line of the table."""
        cells = [
            f"{percentile(values, percent):8.1f}"
            for values in (self.health_ms, self.request_ms)
            for percent in (50, 99)
        ]
        return f"{name:<38} {' '.join(cells)} {self.num_failed:>7}  {note}"


HEADER = f"{'':<38} {'/health p50, p99':>17} {'request p50, p99':>17} {'failed':>7}  (milliseconds)"


async def exchange(port: int, request: bytes) -> bytes:
    """One request over a connection of its own, and the whole answer."""
    reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
    try:
        writer.write(request)
        return await reader.read(-1)
    finally:
        writer.close()


def get(path: str) -> bytes:
    """A GET as bytes."""
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def post(path: str, body: object, *, close: bool = True) -> bytes:
    """A POST of JSON as bytes."""
    data = json.dumps(body).encode()
    ending = "Connection: close\r\n" if close else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{ending}Content-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def completion(model: str, **fields: object) -> bytes:
    """An honest request for four tokens, unless ``fields`` say otherwise."""
    body = {"model": model, "prompt": "def f(x):", "max_tokens": 4, "ignore_eos": True, **fields}
    return post("/v1/completions", body)


async def feel(router: Router, seconds: float) -> Felt:
    """Probe for so long: health often, a whole request a little less so."""
    felt = Felt()
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds

    async def probe(request: bytes, times_ms: list[float], pause_s: float) -> None:
        while loop.time() < until:
            began = loop.time()
            try:
                answer = await exchange(router.port, request)
            except OSError:
                answer = b""
            times_ms.append(1000 * (loop.time() - began))
            felt.num_failed += not answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(pause_s)

    await asyncio.gather(
        probe(get("/health"), felt.health_ms, PROBE_S),
        probe(completion(router.model), felt.request_ms, 2 * PROBE_S),
    )
    return felt


def hostile_body(kind: str, model: str) -> bytes:
    """A body as large as the router takes, of one kind."""
    texts: dict[str, Callable[[], object]] = {
        "control": lambda: "<think>" * (BODY_BYTES // 7),
        "angles": lambda: "</" * (BODY_BYTES // 2),
        "prose": lambda: "the quick brown fox " * (BODY_BYTES // 20),
        "fitting": lambda: "the quick brown fox " * 9000,
    }
    if kind in texts:
        messages = [{"role": "user", "content": texts[kind]()}]
        return post("/v1/chat/completions", {"model": model, "messages": messages}, close=False)
    if kind == "tokenize":
        return post("/tokenize", {"model": model, "prompt": texts["control"]()}, close=False)
    values = {"lists": "[]", "numbers": "1", "messages": '{"role":"user","content":"x"}'}
    one = values[kind]
    many = ",".join([one] * (BODY_BYTES // (len(one) + 1)))
    data = f'{{"model":"{model}","messages":[{many}]}}'.encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


BODIES = ("control", "tokenize", "angles", "prose", "fitting", "lists", "numbers", "messages")


async def post_without_pause(port: int, request: bytes) -> None:
    """Until killed."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
            while True:
                writer.write(request)
                await writer.drain()
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)


async def hold_sockets(port: int, model: str) -> None:
    """500 that never read their answers, 1,000 that send a byte of headers now and then."""
    loop = asyncio.get_running_loop()
    kept: list[socket.socket] = []

    async def connect() -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, (HOST, port))
        kept.append(sock)
        return sock

    for _ in range(NUM_SILENT):
        sock = await connect()
        await loop.sock_sendall(sock, completion(model, max_tokens=64, stream=True))
    dripping = [await connect() for _ in range(NUM_DRIPPING)]
    print("ready", flush=True)
    head = get("/health")[:-4]
    for position in range(10**6):
        for index, sock in enumerate(dripping):
            try:
                sock.send(head[position : position + 1] or b"x")
            except OSError:
                sock.close()
                with contextlib.suppress(OSError):
                    dripping[index] = await connect()
        await asyncio.sleep(DRIP_S)


@contextlib.contextmanager
def attack(router: Router, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """An attack as a process of its own, killed on exit."""
    command = [sys.executable, "-m", "bench.router.hostile", "--port", str(router.port)]
    command += ["--model", router.model, "--attack", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield process
    finally:
        process.kill()
        process.communicate()


async def run_attack(port: int, model: str, name: str) -> None:
    """The inside of an attacking process."""
    if name == "sockets":
        await hold_sockets(port, model)
    request = hostile_body(name, model)
    print("ready", flush=True)
    await post_without_pause(port, request)


async def many_choices(router: Router) -> str:
    """A body of 4 KB that asks for 131,072 choices, five times."""
    request = completion(router.model, prompt=["a"] * 1024, n=128)
    loop = asyncio.get_running_loop()
    times_ms = []
    for _ in range(5):
        began = loop.time()
        answer = await exchange(router.port, request)
        times_ms.append(1000 * (loop.time() - began))
    status = answer.split(maxsplit=2)[1].decode() if answer else "none"
    times = ", ".join(f"{value:.1f}" for value in times_ms)
    return f"131,072 choices in 4 KB: status {status} after {times} ms"


async def burst(router: Router) -> str:
    """Far more requests at once than have a place."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    answers = await asyncio.gather(
        *(exchange(router.port, completion(router.model, max_tokens=16)) for _ in range(NUM_BURST))
    )
    served = sum(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    return f"{NUM_BURST} requests at once: {served} x 200 in {loop.time() - began:.1f} s"


async def rows(router: Router, seconds: float, kinds: Sequence[str]) -> AsyncIterator[str]:
    """The table, line by line; with bodies of these ``kinds``, or with all attacks where none."""
    yield HEADER
    await feel(router, 1.0)
    yield (await feel(router, seconds)).row("idle")
    for kind in kinds or BODIES:
        with attack(router, kind):
            yield (await feel(router, seconds)).row(f"8 MiB bodies without pause: {kind}")
    if kinds:
        yield (await feel(router, seconds)).row("idle again")
    else:
        async for row in _other_rows(router, seconds):
            yield row
    yield f"cores: {len(os.sched_getaffinity(0))}, load {os.getloadavg()[0]:.1f}"


async def _other_rows(router: Router, seconds: float) -> AsyncIterator[str]:
    yield await many_choices(router)
    with attack(router, "sockets"):
        name = f"{NUM_SILENT} never read, {NUM_DRIPPING} drip"
        yield (await feel(router, seconds)).row(name)
    yield await burst(router)
    lines = router.log.read_text(encoding="utf-8", errors="replace").splitlines()
    yield f"leases lost: {sum(LEASE_LOST in line for line in lines)}"


async def measure(router: Router, seconds: float, kinds: Sequence[str]) -> None:
    """Print the table as it comes."""
    async for row in rows(router, seconds, kinds):
        print(row, flush=True)


def main() -> int:
    """Measure, or be one attack of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the decode rank")
    parser.add_argument("--context", type=int, default=0, help="tokens that the model claims")
    parser.add_argument(
        "--bodies", nargs="+", choices=BODIES, default=(), help="these attacks alone"
    )
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8192), hard), hard))
    if options.attack:
        asyncio.run(run_attack(options.port, options.model, options.attack))
        return 0
    with running_router(options.step_ms, context=options.context) as router:
        asyncio.run(measure(router, options.seconds, options.bodies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
