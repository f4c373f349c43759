"""How often what is wrong with played ranks is found within 100 steps, and how often for nothing.

    python -m bench.ranks.detection --windows 2000 --json FILE

A row is of one fault and one number of ranks. *found*: the right class at the right rank or link.
*alone*: and nothing else. Windows without a fault count false alarms; each is of 100 steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.ranks.played import Fault, play
from runtime.stragglers.slow_ranks import Finding, SlowKind, find_slow

RANKS = (4, 8, 16, 72)
CHUNK = 50
"""Windows that are played at once, fewer with more ranks: waits are R * R a phase and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A fault, and what should be said of it: (kind, rank, source) each."""

    name: str
    fault: Fault
    expected: frozenset[tuple[SlowKind, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of one case and number of ranks; shares of the windows."""

    case: str
    num_ranks: int
    num_windows: int
    found: float
    alone: float
    alarms: int
    """Windows in which a fault is reported that is none."""


def _case(name: str, fault: Fault, kind: SlowKind) -> Case:
    expected = frozenset((kind, rank, fault.source) for rank in fault.ranks)
    return Case(name=name, fault=fault, expected=expected)


CASES: Sequence[Case] = (
    Case(name="none", fault=Fault(), expected=frozenset()),
    _case("attention +5 %", Fault(ranks=(1,), attention=1.05), SlowKind.SENDER),
    _case("attention +5 % on two", Fault(ranks=(0, 2), attention=1.05), SlowKind.SENDER),
    _case("rows +20 %", Fault(ranks=(3,), rows=1.2), SlowKind.RECEIVER),
    _case("link 8 us -> 14 us", Fault(ranks=(1,), source=2, link_s=6e-6), SlowKind.LINK),
    _case("gap 100 us -> 400 us", Fault(ranks=(2,), gap_s=300e-6), SlowKind.HOST),
    _case("5 ms pause in 10 steps", Fault(ranks=(0,), pause_s=5e-3, pause_every=10), SlowKind.HOST),
    _case("contexts +10 %", Fault(ranks=(1,), context=1.1), SlowKind.LOAD),
)


def places_of(findings: Sequence[Finding]) -> frozenset[tuple[SlowKind, int, int]]:
    """Return what was found, and where."""
    return frozenset((each.kind, each.rank, each.source) for each in findings)


def detect(case: Case, num_ranks: int, num_windows: int, *, seed: int) -> Row:
    """Play windows of a case, and look at each.

    Args:
        case: that is played.
        num_ranks: R.
        num_windows: of 100 steps.
        seed: of the first chunk; each has its own.
    """
    found = alone = alarms = done = 0
    chunk = max(1, CHUNK * 8 // num_ranks)
    while done < num_windows:
        size = min(chunk, num_windows - done)
        for window in play(size, num_ranks, case.fault, seed=seed + done):
            places = places_of(find_slow(window))
            found += places >= case.expected
            alone += places == case.expected
            alarms += any(kind.is_fault for kind, *_ in places - case.expected)
        done += size
    return Row(
        case=case.name,
        num_ranks=num_ranks,
        num_windows=done,
        found=found / done,
        alone=alone / done,
        alarms=alarms,
    )


def report(rows: Sequence[Row], seconds: float) -> Mapping[str, object]:
    """Return what is written, for programs."""
    return {
        "machine": f"{platform.machine()}, played ranks",
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    """Print a line a case; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=200, help="with 4 and 8 ranks, a case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    for num_ranks in RANKS:
        num_windows = max(1, options.windows * 8 // max(8, num_ranks))
        for case in CASES:
            row = detect(case, num_ranks, num_windows, seed=options.seed * 1_000_003)
            rows.append(row)
            print(
                f"{row.num_ranks:3d} ranks  {row.case:24s} {row.num_windows:6d} windows  "
                f"found {row.found:7.2%}  alone {row.alone:7.2%}  false alarms {row.alarms}",
                flush=True,
            )
    if options.json is not None:
        text = json.dumps(report(rows, time.monotonic() - began), indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
