"""How long a router holds a short request beside what its workers take, and where.

A request's way crosses processes three times on its way in and out. All of them read one clock, so
the three legs between what the client and the fake workers saw are told apart: client to `Reserve`,
its answer to `Run`, that one's answer to the client. What no leg can tell is whose part of it is:
each holds the sending and the receiving of both ends, and their wait for a core. So what the router
says of its own part stands beside them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.router.load import Answer, Client, Router, arrive, body_of, percentile

LEGS = ("client_to_reserve", "reserve_to_run", "run_to_client")
FIRST_RATE = 300.0
NUM_TRIALS = 2
MIN_TRIAL = 50
FLUSH_S = 0.2
"""Fake workers write their moments down once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a time, in milliseconds."""

    p50_ms: float
    p90_ms: float
    p99_ms: float

    @classmethod
    def of(cls, values_s: Sequence[float]) -> Spread:
        """Of at least two values in seconds."""
        p50, p90, p99 = (round(1000 * percentile(list(values_s), p), 3) for p in (50, 90, 99))
        return cls(p50_ms=p50, p90_ms=p90, p99_ms=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Result of one run."""

    load: str
    num_requests: int
    router_cpu_share: float
    router_wait_share: float
    """Of the time: some thread of the router could have run and had no core."""
    first_bytes: Spread
    """As the client sees it."""
    outside_workers: Spread
    """The same without the time in the two handlers of the fake workers: the router, and what it
    takes fake workers and client to send and to receive."""
    legs: dict[str, Spread]
    """What the line above is the sum of."""
    in_router: Spread
    """By the router's clock, to the first token: it had what it waited for, and had not handed on
    what others wait for. Reading from sockets and writing to them are not in it."""
    after_first: Spread
    """The same, from the first token to the end of the answer, ready to be sent."""
    load_average: float


def legs_of(sent_at: float, moments: Sequence[float], first_at: float) -> tuple[float, ...]:
    """Seconds of each of ``LEGS``; ``moments`` are a request's four in the fake workers."""
    reserve_came, reserve_answered, run_came, run_answered = moments
    return reserve_came - sent_at, run_came - reserve_answered, first_at - run_answered


def read_stamps(path: Path) -> dict[str, list[float]]:
    """Moments by the id that the client has given its request."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {name.partition(".")[0]: [float(value) for value in rest] for name, *rest in lines}


def told_timings(answer: Answer) -> dict[str, float]:
    """What the router says in the stream's closing event."""
    events = [json.loads(part[6:]) for part in answer.kept.split(b"\n") if part[:7] == b"data: {"]
    timings: dict[str, float] = events[-1]["timings"]
    return timings


async def measure_added(router: Router, *, rate: float, num_requests: int) -> Added:
    """Ask for one token ``rate`` times a second; 0: one request after the other."""
    assert router.stamps is not None
    answers: dict[str, Answer] = {}
    run = os.urandom(4).hex()
    body = {**body_of(1, stream=True), "timings": True}

    async def ask(client: Client, number: int) -> None:
        name = f"{run}-{number}"
        answers[name] = await client.ask(body, request_id=name, keeps=True)

    times, began = router.times_s(), time.perf_counter()
    if rate:
        await arrive(router, rate, num_requests, ask)
    else:
        async with Client.connected(router) as client:
            for number in range(num_requests):
                await ask(client, number)
    wall_s = time.perf_counter() - began
    shares = [(now - then) / wall_s for now, then in zip(router.times_s(), times, strict=True)]
    await asyncio.sleep(FLUSH_S)
    load = f"{rate:.0f} a second" if rate else "one by one"
    return _added(load, shares, answers, read_stamps(router.stamps))


async def calmest(router: Router, rate: float, *, num_requests: int, num_rounds: int) -> Added:
    """Of several rounds the one in which the router waited least for a core.

    Other work on the machine comes and goes within seconds; what it delays is not the router's.
    """
    rounds = [
        await measure_added(router, rate=rate, num_requests=num_requests) for _ in range(num_rounds)
    ]
    return min(rounds, key=lambda each: each.router_wait_share)


async def rate_for(router: Router, share: float) -> float:
    """Requests a second that take the router ``share`` of a core.

    It is found by trying: what comes one by one shares no message and no cache, and costs up to
    twice of what comes in a crowd.
    """
    rate = FIRST_RATE
    for _ in range(NUM_TRIALS):
        trial = await measure_added(router, rate=rate, num_requests=max(MIN_TRIAL, round(rate)))
        rate *= share / trial.router_cpu_share
    return rate


def _added(
    load: str, shares: Sequence[float], answers: dict[str, Answer], stamps: dict[str, list[float]]
) -> Added:
    legs = [legs_of(each.sent_at, stamps[name], each.first_at) for name, each in answers.items()]
    columns = zip(*legs, strict=True)
    told = [told_timings(answer) for answer in answers.values()]
    return Added(
        load=load,
        num_requests=len(answers),
        router_cpu_share=round(shares[0], 3),
        router_wait_share=round(shares[1], 3),
        first_bytes=Spread.of([answer.ttft_s for answer in answers.values()]),
        outside_workers=Spread.of([sum(each) for each in legs]),
        legs={name: Spread.of(values) for name, values in zip(LEGS, columns, strict=True)},
        in_router=Spread.of([each["in_router_s"] for each in told]),
        after_first=Spread.of([each["total_s"] - each["ttft_s"] for each in told]),
        load_average=round(os.getloadavg()[0], 2),
    )


def as_json(added: Sequence[Added]) -> list[dict[str, object]]:
    """Rows of a record."""
    return [dataclasses.asdict(each) for each in added]
