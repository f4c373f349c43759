"""Two trees of this project in turns: what a short request costs the router of each.

On a machine with other work no two runs compare, but two routers at once do, which are asked in
turns: each round has all of them, and of many rounds the least and the quartiles count.
``python -m bench.router.turns TREE ...``; prints one JSON object. Each tree's router has fake
workers of its own, of the same tree; the client is of this one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.router.load import Router, measure_requests
from bench.router.running import running_router

Costs = dict[str, dict[str, list[float]]]
"""By kind of request and by tree: microseconds, a round each."""


async def measure_turns(routers: dict[str, Router], options: argparse.Namespace) -> Costs:
    """``options.rounds`` of streams and whole answers, several and one at a time."""
    kinds = {
        "streamed": (options.concurrency, options.requests, True),
        "whole": (options.concurrency, options.requests, False),
        "streamed, one by one": (1, options.requests // 8, True),
    }
    costs: Costs = defaultdict(lambda: defaultdict(list))
    for router in routers.values():
        await measure_requests(router, concurrency=8, num_requests=400, max_tokens=1, stream=True)
    for number in range(options.rounds):
        trees = list(routers) if number % 2 else list(reversed(routers))
        for kind, (concurrency, num_requests, stream) in kinds.items():
            for tree in trees:
                result = await measure_requests(
                    routers[tree],
                    concurrency=concurrency,
                    num_requests=num_requests,
                    max_tokens=1,
                    stream=stream,
                )
                costs[f"CPU, {kind}"][tree].append(1e6 / result.requests_per_core_s)
                if concurrency == 1:
                    costs[f"first bytes, {kind}"][tree].append(1000 * result.ttft_p50_ms)
    return costs


def summary(values: Sequence[float]) -> dict[str, int]:
    """Of at least two rounds, in microseconds."""
    quartile, median, _ = statistics.quantiles(values, n=4, method="inclusive")
    return {
        "least_us": round(min(values)),
        "quartile_us": round(quartile),
        "median_us": round(median),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", type=Path, nargs="+", help="folders of the project's code")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=400, help="of a kind, a round")
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        routers = {
            str(tree): stack.enter_context(
                running_router(20.0, tree=tree.resolve(), max_concurrent_requests=1024)
            )
            for tree in options.trees
        }
        costs = uvloop.run(measure_turns(routers, options))
    rows = {
        kind: {tree: summary(values) for tree, values in by_tree.items()}
        for kind, by_tree in costs.items()
    }
    print(json.dumps({**rows, "load_average": round(os.getloadavg()[0], 2)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
