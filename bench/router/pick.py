"""What routing costs per request: one pick, and one announcement of the pool, in microseconds.

Run ``python -m bench.router.pick``; prints one JSON object. No network: a view of the pool and a
policy as one HTTP process has them. Between picks the load of members changes as it does in
service: the picked ones get a request each, frames of some decode ranks arrive.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import PoolView
from router.routing.policy import PairingPolicy
from router.routing.prefixes import Prefixes
from router.routing.request_shape import RequestShape
from router.routing.scorers import SCORERS
from runtime.block_hash import hash_blocks

RANKS_PER_INSTANCE = 8
BLOCK_SIZE = 64
CONTEXT_TOKENS = 4096
HELD_BLOCKS = 32
REPORTS_PER_PICK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Medians, in microseconds of this thread's CPU: they hold whatever else the machine does."""

    pick_us: float
    retry_pick_us: float
    """With members excluded and suspected."""
    failing_pick_us: float
    """While one instance has failed a moment ago."""
    report_us: float
    update_us: float
    """One member has another load, all others are as before."""
    rebuild_us: float
    """A member has left, and the next pick."""
    context_pick_us: float
    """Of a context of 4,096 tokens, half of which one prefill worker holds; with a policy that goes
    by prefixes its blocks are hashed and looked up, which is in it."""


def members_of(role: Role, number: int) -> list[Member]:
    """As many endpoints, in instances of 8 ranks."""
    return [
        Member(
            key=WorkerKey(
                f"{role.value}-{index // RANKS_PER_INSTANCE}", 1, index % RANKS_PER_INSTANCE
            ),
            role=role,
            address=f"127.0.0.1:{index}",
            num_ranks=min(RANKS_PER_INSTANCE, number - index + index % RANKS_PER_INSTANCE),
            model="m",
            max_model_len=131072,
            layout_fingerprint="l",
            transport="nixl",
            block_size=BLOCK_SIZE,
            max_num_requests=256 if role is Role.DECODE else 0,
            load=WorkerLoad(num_free_blocks=4096, num_total_blocks=4096, sequence=1),
        )
        for index in range(number)
    ]


class Bench:
    """A pool, a policy, and the numbers that reports have."""

    def __init__(self, num_prefills: int, num_decodes: int, policy: str) -> None:
        self.decodes = members_of(Role.DECODE, num_decodes)
        self.members = [*members_of(Role.PREFILL, num_prefills), *self.decodes]
        self.now = 0.0
        self.pool = PoolView(lambda: self.now)
        self.pool.update(self.members)
        self.policy = PairingPolicy(policy, prefixes=Prefixes(lambda: self.now))
        self.random = random.Random(0)
        self.sequences = itertools.count(2)

    def load(self) -> WorkerLoad:
        """A new report."""
        return WorkerLoad(
            num_requests_running=self.random.randrange(200),
            num_free_blocks=self.random.randrange(1000, 4096),
            num_total_blocks=4096,
            sequence=next(self.sequences),
        )

    def picks_us(self, num_picks: int, shape: RequestShape) -> float:
        """One pick with reports of a few ranks before it, which are not timed."""
        times = []
        for _ in range(num_picks):
            for member in self.random.sample(self.decodes, REPORTS_PER_PICK):
                self.pool.report(member.key, self.load())
            start = time.thread_time()
            pair = self.policy.pick(shape, self.pool)
            times.append(time.thread_time() - start)
            with self.pool.in_flight(pair.prefill.key, 1000), self.pool.in_flight(pair.decode.key):
                pass
        return 1e6 * statistics.median(times)

    def context_picks_us(self, num_picks: int) -> float:
        """One pick with all that goes before it, for contexts that have nothing in common."""
        times, prefixes = [], self.policy.prefixes
        for _ in range(num_picks):
            tokens = self.random.choices(range(100_000), k=CONTEXT_TOKENS)
            if prefixes is not None:
                holder = self.random.choice(self.members).key
                prefixes.index.add(holder)
                prefixes.index.store(holder, hash_blocks(tokens, BLOCK_SIZE)[:HELD_BLOCKS])
            start = time.thread_time()
            hashes = hash_blocks(tokens, BLOCK_SIZE) if prefixes is not None else ()
            shape = RequestShape(num_context_tokens=len(tokens), block_hashes=hashes)
            pair = self.policy.pick(shape, self.pool)
            times.append(time.thread_time() - start)
            with self.pool.in_flight(pair.prefill.key, 1000), self.pool.in_flight(pair.decode.key):
                pass
        return 1e6 * statistics.median(times)

    def reports_us(self, num_reports: int) -> float:
        """One report by a frame."""
        reports = [(self.random.choice(self.decodes).key, self.load()) for _ in range(num_reports)]
        start = time.thread_time()
        for key, load in reports:
            self.pool.report(key, load)
        return 1e6 * (time.thread_time() - start) / num_reports

    def updates_us(self, num_updates: int) -> float:
        """One announcement, in which one member has another load."""
        times = []
        for _ in range(num_updates):
            index = self.random.randrange(len(self.members))
            self.members[index] = replace(self.members[index], load=self.load())
            start = time.thread_time()
            self.pool.update(self.members)
            times.append(time.thread_time() - start)
        return 1e6 * statistics.median(times)

    def rebuilds_us(self, num_rebuilds: int) -> float:
        """Members come and go."""
        times = []
        for number in range(num_rebuilds):
            start = time.thread_time()
            self.pool.update(self.members[: len(self.members) - number % 2])
            self.policy.pick(RequestShape(num_context_tokens=1000), self.pool)
            times.append(time.thread_time() - start)
        self.pool.update(self.members)
        return 1e6 * statistics.median(times)


def measure(
    num_prefills: int, num_decodes: int, repeats: int, policy: str = "least-loaded"
) -> Costs:
    """All costs at one size of the pool."""
    bench = Bench(num_prefills, num_decodes, policy)
    shape = RequestShape(num_context_tokens=1000)
    failed = bench.decodes[0].key
    retry = replace(shape, excluded={failed}, suspects={bench.members[0].key, failed})
    pick_us, retry_us = bench.picks_us(repeats, shape), bench.picks_us(repeats, retry)
    bench.pool.mark_failed(failed, "benchmark")
    failing_us = bench.picks_us(repeats, shape)
    bench.now += 60.0
    return Costs(
        pick_us=round(pick_us, 1),
        retry_pick_us=round(retry_us, 1),
        failing_pick_us=round(failing_us, 1),
        report_us=round(bench.reports_us(repeats), 1),
        update_us=round(bench.updates_us(repeats), 1),
        rebuild_us=round(bench.rebuilds_us(max(2, repeats // 10)), 1),
        context_pick_us=round(bench.context_picks_us(max(2, repeats // 10)), 1),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.router.pick", description=__doc__)
    parser.add_argument("--prefills", type=int, default=16, help="prefill endpoints")
    parser.add_argument("--decodes", type=int, default=144, help="decode endpoints")
    parser.add_argument("--policy", choices=list(SCORERS), default="least-loaded")
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args(arguments)
    costs = measure(options.prefills, options.decodes, options.repeats, options.policy)
    result = {
        "policy": options.policy,
        "prefills": options.prefills,
        "decodes": options.decodes,
        **{name: getattr(costs, name) for name in Costs.__slots__},
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
