"""One request over HTTP, as a client streams it: when how many tokens came, and how it ended.

Written on bare sockets: the client shares its one core with nobody, but must not be the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from bench.pair.model_folder import count_tokens

clock = time.perf_counter
"""An event loop's own clock stands still within a turn, and may count in milliseconds."""

_EVENT = b"data: {"
_HEADERS = "Connection: close\r\nx-tandem-timings: 1\r\nContent-Type: application/json\r\n"


@dataclass(slots=True, kw_only=True)
class RequestLog:
    """What a client saw of one request; moments are those of `clock`, in seconds.

    Attributes:
        prompt_len: tokens sent.
        max_tokens: tokens asked for.
        sent: when the request was sent.
        arrivals: (moment, tokens) of each event with text.
        ended: when the answer was complete; 0 while it is not.
        error: why it failed; empty if it did not.
        timings: what the router says of its stages, in seconds.
    """

    prompt_len: int
    max_tokens: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def is_over(self) -> bool:
        """Whether the whole answer came."""
        return bool(self.ended) and not self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    model: str


async def send(target: Target, prompt: list[int], max_tokens: int, *, seed: int) -> RequestLog:
    """Send one prompt and take in the whole answer; a failure is noted, never raised."""
    log = RequestLog(prompt_len=len(prompt), max_tokens=max_tokens, sent=clock())
    try:
        await _stream(target, _body(target, prompt, max_tokens, seed), log)
    except (OSError, ValueError) as error:
        log.error = log.error or f"{type(error).__name__}: {error}"
    if not log.error and log.num_tokens != max_tokens:
        log.error = f"{log.num_tokens} of {max_tokens} tokens came"
    log.ended = clock()
    return log


def _body(target: Target, prompt: list[int], max_tokens: int, seed: int) -> bytes:
    return json.dumps(
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            # Invented weights say the same token for ever at temperature 0.
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
        }
    ).encode()


async def _stream(target: Target, body: bytes, log: RequestLog) -> None:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=2**20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {target.host}\r\n{_HEADERS}"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            rest = (await reader.read())[-600:]
            raise ValueError(f"{status.decode().strip()}: {rest.decode(errors='replace')}")
        pending = b""
        while data := await reader.read(2**16):
            now = clock()
            # An event is one line. Lines of the chunked encoding are no events.
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                if line.startswith(_EVENT):
                    _take(json.loads(line[6:]), now, log)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _take(event: dict[str, Any], now: float, log: RequestLog) -> None:
    if "error" in event:
        log.error = str(event["error"]["message"])
        return
    log.timings |= event.get("timings", {})
    count = sum(count_tokens(choice["text"]) for choice in event["choices"])
    if count:
        log.arrivals.append((now, count))
