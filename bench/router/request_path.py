"""What a router costs: streamed tokens and requests per second of one core, and added TTFT.

Run ``python -m bench.router.request_path``; prints one JSON object. The router is the real process;
behind it stand workers that compute nothing (``bench.router.workers``), so all time is the router's
or the wire's. "Per core" is work divided by the router process's CPU seconds: it holds whatever
else the machine does. ``--command`` measures another router in the same way, before workers of
OpenAI's HTTP API (``bench.router.http_workers``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys

import uvloop

from bench.router.added import as_json, calmest, rate_for
from bench.router.load import (
    Router,
    measure_arrivals,
    measure_requests,
    measure_streams,
)
from bench.router.running import running_peer, running_router

SHARES = (0.3, 0.7)
"""Of a core, that the router is busy while it is asked what it adds."""


async def measure_all(router: Router, options: argparse.Namespace) -> dict[str, object]:
    """Every part, one after the other."""
    most = options.requests
    await measure_requests(router, concurrency=4, num_requests=40, max_tokens=4, stream=True)
    alone = await measure_requests(
        router, concurrency=1, num_requests=most, max_tokens=1, stream=True
    )
    streams = [await measure_streams(router, number, options.tokens) for number in options.streams]
    short = [
        await measure_requests(
            router, concurrency=32, num_requests=4 * most, max_tokens=1, stream=stream
        )
        for stream in (False, True)
    ]
    rate = max(1.0, 0.7 * short[-1].wall_requests_per_s)
    loaded = await measure_arrivals(router, rate=rate, num_requests=4 * most, max_tokens=1)
    added = []
    if router.stamps is not None:
        rates = [0.0, *[await rate_for(router, share) for share in SHARES]]
        added = [
            await calmest(router, rate, num_requests=most, num_rounds=options.rounds)
            for rate in rates
        ]
    return {
        "added_ttft_p50_ms": alone.ttft_p50_ms,
        "added_ttft_p99_ms": alone.ttft_p99_ms,
        "streams": [dataclasses.asdict(each) for each in streams],
        "short_requests": [dataclasses.asdict(each) for each in (*short, loaded)],
        "added": as_json(added),
        "step_ms": options.step_ms,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[128, 384])
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of one stream")
    parser.add_argument("--requests", type=int, default=300, help="requests for the added TTFT")
    parser.add_argument("--rounds", type=int, default=12, help="of what the router adds")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the decode rank")
    parser.add_argument(
        "--pin", action="store_true", help="give our router the first core and the rest to others"
    )
    parser.add_argument(
        "--command", help="of another router, with {port}, {prefill} and {decode} in it"
    )
    options = parser.parse_args()
    # All streams at once: what is measured is the router, not its queue.
    most = max(1024, *options.streams)
    running = (
        running_peer(options.command, options.step_ms)
        if options.command
        else running_router(options.step_ms, pin=options.pin, max_concurrent_requests=most)
    )
    with running as router:
        print(json.dumps(uvloop.run(measure_all(router, options)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
