"""Greedy streams against a cluster, in the background, judged against the oracle."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.sampling import SamplingParams
from tests.integration.client import stream

NUM_TOKENS = 24
NUM_DISTINCT = 6


@dataclass(slots=True)
class Expected:
    """Prompts, and what follows on each."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def expect(oracle: DeepseekV3ForCausalLM) -> Expected:
    """Ask the model in this process."""
    draw = random.Random(43)
    lengths = [draw.randrange(1, 150) for _ in range(NUM_DISTINCT)]
    prompts = [[draw.randrange(300, 4000) for _ in range(n)] for n in lengths]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    outputs = generate(oracle, prompts, [greedy] * len(prompts))
    return Expected(prompts, [output.token_ids for output in outputs])


@dataclass(slots=True)
class Load:
    """A few streams at a time while in the block; all are answered when it ends."""

    base_url: str
    expected: Expected
    concurrency: int = 2
    ca: Path | None = None
    """Of the authority that is believed; None: plain text."""
    answered_at: list[float] = field(default_factory=list)
    """When each request was answered in full."""
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(180)
        assert not self._thread.is_alive(), "a request was never answered"

    def num_answered_since(self, moment: float) -> int:
        """How many requests were answered after ``moment`` of the monotonic clock."""
        return sum(at > moment for at in self.answered_at)

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=170)
        context = ssl.create_default_context(cafile=str(self.ca)) if self.ca else True
        sockets: list[socket.socket] = []

        def open_socket(info: aiohttp.AddrInfoType) -> socket.socket:
            sockets.append(socket.socket(*info[:3]))
            return sockets[-1]

        connector = aiohttp.TCPConnector(ssl=context, socket_factory=open_socket)
        async with aiohttp.ClientSession(
            self.base_url, timeout=timeout, connector=connector
        ) as session:
            await asyncio.gather(*(self._stream(session, n) for n in range(self.concurrency)))
        # With TLS ends are said goodbye to, after the session.
        while any(one.fileno() >= 0 for one in sockets):
            await asyncio.sleep(0.05)

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while not self._stop.is_set():
            which = draw.randrange(len(self.expected.prompts))
            try:
                answer = await stream(
                    session,
                    self.expected.prompts[which],
                    model="tandem-python",
                    max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                    temperature=0,
                )
            except (aiohttp.ClientError, TimeoutError, AssertionError) as error:
                self.failures.append(repr(error))
                continue
            if answer.error is not None:
                self.failures.append(f"{answer.request_id}: {answer.error}")
            elif answer.token_ids != self.expected.outputs[which]:
                self.failures.append(f"{answer.request_id}: another text")
            else:
                self.answered_at.append(time.monotonic())
