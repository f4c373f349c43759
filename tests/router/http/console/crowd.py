"""Many fake workers on several addresses: real registrations, loads that move as real ones do.

For tests, measurements and pictures of the console. What they report is a function of time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp

from router.text.tokenizer import Tokenizer
from runtime.pb import decode_pb2, registry_pb2
from tests.router.conftest import MODEL
from tests.router.fakes import FakeDecode, FakePrefill
from tests.router.outputs import MAX_MODEL_LEN

PER_HOST = 8
NUM_BLOCKS = 4096
BATCH = 128


@dataclass
class Sway:
    """The load of one worker, which goes up and down around its own mean."""

    number: int
    is_prefill: bool
    peers: Sequence[str] = ()
    began: float = field(default_factory=time.monotonic)

    def share(self, period_s: float = 47.0) -> float:
        """How busy it is now, of 1."""
        own = 0.35 + 0.5 * ((self.number * 0.618) % 1)
        turn = 2 * math.pi * (time.monotonic() - self.began) / period_s + self.number
        return max(0.02, min(0.99, own + 0.14 * math.sin(turn)))

    def report(self) -> registry_pb2.WorkerLoad:
        """As a renewal tells it."""
        share, seconds = self.share(), time.monotonic() - self.began
        mean = 0.35 + 0.5 * ((self.number * 0.618) % 1)
        rate = (21_000 if self.is_prefill else 2_400) * mean
        load = registry_pb2.WorkerLoad(
            num_requests_running=round(share * (6 if self.is_prefill else BATCH)),
            num_requests_waiting=round(share * 3),
            num_tokens_waiting=round(share * 40_000) if self.is_prefill else 0,
            num_free_blocks=round((1 - share) * NUM_BLOCKS),
            num_total_blocks=NUM_BLOCKS,
            num_tokens_done=int(rate * (10 + seconds + 6 * math.sin(seconds / 9 + self.number))),
            num_steps_done=int(seconds * 22),
        )
        for place, peer in enumerate(self.peers):
            sent = int(1.4e9 * mean * seconds / (1 + place))
            load.received.add(peer=peer, num_bytes=sent)
        return load


class QuietDecode(FakeDecode):
    """Its frames carry tokens and no load: that is told by renewals alone."""

    def send(self, router_id: str, deltas: Iterable[decode_pb2.TokenDelta]) -> None:
        """One frame, where somebody reads."""
        if router_id in self._streams:
            frame = decode_pb2.Frame(decode=self.identity, deltas=deltas)
            self._streams[router_id].put_nowait(frame)


class Crowd:
    """Workers of both roles, eight an address of 127.0.1.x."""

    def __init__(self, control: str, tokenizer: Tokenizer) -> None:
        """``control`` is the registry's address."""
        self._control = control
        self._ids = tokenizer.encode("the quick brown fox", add_special_tokens=False)
        self.prefills: list[FakePrefill] = []
        self.decodes: list[FakeDecode] = []

    async def start(self, num_prefill: int, num_decode: int) -> None:
        """Register so many."""
        names = [f"prefill-{n}/0" for n in range(num_prefill)]
        for n in range(num_prefill):
            sway, host = Sway(n, True), _host(n)
            name = f"prefill-{n}"
            worker = FakePrefill(name, MODEL, self._script, host=host, report=sway.report)
            self.prefills.append(worker)
        before = -(-num_prefill // PER_HOST) * PER_HOST
        for n in range(num_decode):
            peers = [names[(n + step) % num_prefill] for step in range(min(3, num_prefill))]
            worker = QuietDecode(
                f"decode-{n}",
                MODEL,
                self._script,
                host=_host(before + n),
                report=Sway(n, False, peers).report,
                max_num_requests=BATCH,
                step_s=0.04,
            )
            self.decodes.append(worker)
        workers = (*self.prefills, *self.decodes)
        await asyncio.gather(*(worker.start(self._control) for worker in workers))

    async def close(self) -> None:
        """All leave."""
        await asyncio.gather(*(worker.close() for worker in (*self.prefills, *self.decodes)))

    def _script(self, prompt: Sequence[int]) -> list[int]:
        return self._ids * MAX_MODEL_LEN


def _host(number: int) -> str:
    return f"127.0.1.{1 + number // PER_HOST}"


async def ask(url: str, num_requests: int, *, max_tokens: int = 60) -> None:
    """So many completions at once, to their end, whatever that is."""
    body = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": max_tokens}
    async with aiohttp.ClientSession(url) as http:

        async def one() -> None:
            async with http.post("/v1/completions", json=body) as response:
                await response.read()

        await asyncio.gather(*(one() for _ in range(num_requests)))
