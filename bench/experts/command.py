"""What plans reach on synthetic skew, and how long they take.

    python -m bench.experts.command [--repeats 20] [--objective rows]

Prints a line for each case: planned from window 1, measured on window 2 (`bench.experts.skew`), and
then the milliseconds of a plan of 61 layers. Pure CPU, one thread of our own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bench.experts.skew import skewed_windows
from experts.balance import balance_layers
from experts.balancedness import even_placement
from experts.moves import order_moves
from experts.plan import plan_placement
from experts.rearrange import rearrange
from experts.simulation import Cluster, Objective, simulate
from experts.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class Case:
    """A role on a cluster.

    Attributes:
        name: for the table.
        role: of the trace.
        tokens: of a pass, over all ranks.
        cluster: to replay on.
        redundant: numbers of redundant experts.
    """

    name: str
    role: str
    tokens: int
    cluster: Cluster
    redundant: tuple[int, ...] = (0, 32)


CASES = (
    Case("32 ranks, 4,096 tokens", "decode", 4096, Cluster(num_ranks=32)),
    Case("prefill, 8 ranks, 16,384", "prefill", 16_384, Cluster(num_ranks=8)),
    Case("decode, 8 ranks, 512", "decode", 512, Cluster(num_ranks=8)),
    Case("decode, 8 ranks, 1,024", "decode", 1024, Cluster(num_ranks=8)),
    Case("decode, 72 ranks, 9,216", "decode", 9216, Cluster(num_ranks=72), (32,)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="of every timing")
    parser.add_argument(
        "--objective", choices=("time", "rows"), default="time", help="of plans (default: time)"
    )
    arguments = parser.parse_args(argv)
    titles = "case redundant experts balancedness of_floor worst gain moves GB steps"
    print(f"| {' | '.join(titles.split())} |".replace("_", " "))
    print("|---|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        _print_case(case, arguments.objective)
    print()
    print("| 61 layers x 256 experts | ms, median (least) of the wall clock | CPU ms |")
    print("|---|---|---|")
    for num_ranks, num_redundant in ((8, 0), (8, 32), (32, 32), (72, 32)):
        _print_speed(num_ranks, num_redundant, arguments.repeats)


def _print_case(case: Case, objective: Objective) -> None:
    trace = skewed_windows(role=case.role, tokens=case.tokens)
    simulation = simulate(
        trace,
        case.cluster,
        redundant=case.redundant,
        model=TimeModel.of_trace(trace),
        objective=objective,
    )
    for outcome in simulation.outcomes:
        now, floor, moved = outcome.balancedness, outcome.floor, outcome.moved
        planned = "left" if outcome.refusal else "planned"
        cells = (
            case.name,
            str(outcome.num_redundant),
            planned if outcome.is_planned else "evenly",
            f"{now.overall:.3f}",
            f"{now.overall / floor.overall:.1%}",
            f"{now.worst_layer:.3f}",
            f"{outcome.gain:+.1%}",
            f"{moved.num_moves if moved else 0:,}",
            f"{(moved.num_bytes if moved else 0) / 1e9:.0f}",
            f"{moved.num_rounds if moved else 0:,}",
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def _print_speed(num_ranks: int, num_redundant: int, repeats: int) -> None:
    window = skewed_windows(role="decode", tokens=128 * num_ranks, num_layers=61).rows(0, 16)
    slots = 256 + num_redundant
    now_LP = np.tile(even_placement(256, slots, num_ranks), (61, 1))
    load_LE = window.counts_NLE.sum(axis=0).astype(np.float64)
    target_LP = rearrange(now_LP, load_LE, num_ranks=num_ranks)
    # A window later most experts stand well: what a running instance plans every time.
    later = skewed_windows(role="decode", tokens=128 * num_ranks, num_layers=61).rows(16, 32)
    model = TimeModel.of_trace(window)
    timed: dict[str, Callable[[], object]] = {
        "few moves": lambda: rearrange(now_LP, load_LE, num_ranks=num_ranks),
        "afresh": lambda: balance_layers(load_LE[None], num_slots=slots, num_ranks=num_ranks),
        "rounds of the first": lambda: order_moves(now_LP, target_LP, num_ranks=num_ranks),
        "whole plan, first": lambda: plan_placement(
            window, now_LP, num_ranks=num_ranks, model=model
        ),
        "whole plan, later": lambda: plan_placement(
            later, target_LP, num_ranks=num_ranks, model=model
        ),
    }
    for name, run in timed.items():
        walls, cpus = [], []
        for _ in range(repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            walls.append((time.perf_counter() - wall) * 1e3)
            cpus.append((time.process_time() - cpu) * 1e3)
        label = f"{num_ranks} ranks, {num_redundant} redundant: {name}"
        wall_ms = f"{statistics.median(walls):.1f} ({min(walls):.1f})"
        print(f"| {label} | {wall_ms} | {statistics.median(cpus):.1f} |", flush=True)


if __name__ == "__main__":
    main()
