"""Compare policies: `python -m bench.router.pairs.command`; prints one JSON object a run.

The same seed gives the same requests to every policy, and the same figures each time. What no
policy can beat is in the rows, too: `floor_p99_s` is the p99 of what the requests would take with
nobody else about and a cache of everything ever computed, `excess_*` what they took beyond that.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence

from bench.router.pairs.engines import Speeds
from bench.router.pairs.simulation import Simulation
from bench.router.pairs.traces import TRACES
from router.routing.scorers import SCORERS

WITH_IDS = "+ids"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    program = "python -m bench.router.pairs.command"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    names = [*SCORERS, *(f"{n}{WITH_IDS}" for n, scorer in SCORERS.items() if scorer.by_prefix)]
    parser.add_argument("--policy", nargs="+", choices=names, default=list(SCORERS))
    parser.add_argument("--trace", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--load", type=float, default=1.0, help="times the usual arrivals")
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--prefills", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=16)
    options = parser.parse_args(arguments)
    for trace, seed in itertools.product(options.trace, options.seed):
        sessions = TRACES[trace](seed, options.load, options.seconds)
        for policy in options.policy:
            simulation = Simulation(
                policy.removesuffix(WITH_IDS),
                num_prefills=options.prefills,
                num_decodes=options.decodes,
                speeds=Speeds(),
                with_ids=policy.endswith(WITH_IDS),
            )
            row = simulation.run(sessions).row()
            head = {"trace": trace, "policy": policy, "load": options.load, "seed": seed}
            print(json.dumps({**head, **row}), flush=True)


if __name__ == "__main__":
    main()
