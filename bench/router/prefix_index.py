"""What the router's prefix index costs: memory, a lookup, an event.

Run ``python -m bench.router.prefix_index``; prints one JSON object. No network: an index as one
HTTP process has it, of as many ranks and blocks as asked for. ``--holders`` ranks hold each block;
with more than one, chains of 64 blocks have their holders in common, as contexts do.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence

import psutil

from router.pool.cache_follower import SLICE_BLOCKS
from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixIndex
from runtime.block_hash import hash_blocks

CHAIN = 64
"""Blocks of one context: 4,096 tokens in blocks of 64."""
BATCH = 64
"""Events of one frame."""


def keys_of(number: int) -> list[WorkerKey]:
    """As many ranks."""
    return [WorkerKey(f"prefill-{n // 8}", 1, n % 8) for n in range(number)]


def chains(number: int, source: random.Random) -> Iterator[list[bytes]]:
    """As many contexts that have nothing in common."""
    for _ in range(number):
        yield [source.randbytes(16) for _ in range(CHAIN)]


def fill(
    index: PrefixIndex, keys: Sequence[WorkerKey], num_blocks: int, holders: int
) -> list[list[bytes]]:
    """Give every rank ``num_blocks`` blocks; returns some of the contexts."""
    source, kept = random.Random(0), []
    for key in keys:
        index.add(key)
    for number, chain in enumerate(chains(len(keys) * num_blocks // CHAIN // holders, source)):
        for holder in range(holders):
            index.store(keys[(number * holders + holder) % len(keys)], chain)
        if number % 97 == 0:
            kept.append(chain)
    return kept


def lookups_us(index: PrefixIndex, contexts: Sequence[Sequence[bytes]]) -> list[float]:
    """Microseconds of one lookup each, with the ranks of its best level."""
    times = []
    for context in contexts:
        start = time.perf_counter()
        match = index.match(context)
        next(iter(match.levels()))
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times)


def events_per_s(index: PrefixIndex, keys: Sequence[WorkerKey], num_events: int) -> float:
    """Blocks stored and, later, removed, in frames of 64; of this one core."""
    source = random.Random(1)
    news = list(chains(num_events // 2 // CHAIN, source))
    start = time.perf_counter()
    for number, chain in enumerate(news):
        index.store(keys[number % len(keys)], chain)
    for number, chain in enumerate(news):
        index.discard(keys[number % len(keys)], chain)
    return 2 * len(news) * CHAIN / (time.perf_counter() - start)


def leaves_us(index: PrefixIndex, key: WorkerKey) -> tuple[float, float]:
    """Microseconds in which a rank is gone, and of one slice of what it held (the median)."""
    start = time.perf_counter()
    index.remove(key)
    leave_s, slices_s, is_more = time.perf_counter() - start, [], True
    while is_more:
        start = time.perf_counter()
        is_more = index.sweep(SLICE_BLOCKS)
        slices_s.append(time.perf_counter() - start)
    return 1e6 * leave_s, 1e6 * statistics.median(slices_s)


def measure(num_ranks: int, num_blocks: int, holders: int) -> dict[str, float]:
    """All costs at one size."""
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    index, keys = PrefixIndex(), keys_of(num_ranks)
    kept = fill(index, keys, num_blocks, holders)
    memory = process.memory_info().rss - before
    times = lookups_us(index, random.Random(2).sample(kept, min(len(kept), 1000)))
    scaffold = [random.Random(3).randbytes(16) for _ in range(CHAIN)]
    for key in keys:
        index.store(key, scaffold)
    shared = lookups_us(index, [scaffold] * 100)
    rate = events_per_s(index, keys, 200_000)
    leave_us, slice_us = leaves_us(index, keys[0])
    tokens = random.Random(4).choices(range(100_000), k=4096)
    start = time.perf_counter()
    for _ in range(100):
        hash_blocks(tokens, 64)
    return {
        "memory_gib": round(memory / 2**30, 3),
        "blocks": len(index),
        "lookup_us": round(statistics.median(times), 1),
        "lookup_p99_us": round(times[int(0.99 * len(times))], 1),
        "lookup_held_by_all_us": round(statistics.median(shared), 1),
        "events_per_s": round(rate),
        "leave_us": round(leave_us, 1),
        "slice_us": round(slice_us, 1),
        "hash_4k_tokens_us": round(1e4 * (time.perf_counter() - start), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.router.prefix_index", description=__doc__
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000, help="of each rank")
    parser.add_argument("--holders", type=int, default=1, help="ranks that hold each block")
    options = parser.parse_args(arguments)
    costs = measure(options.ranks, options.blocks, options.holders)
    result = {**vars(options), **costs, "python": platform.python_version()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
