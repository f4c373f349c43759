"""Played instances that are watched for hours: alarms for nothing, and how soon a fault is found.

    python -m bench.ranks.watched --hours 4 --json FILE

Attention of each rank wanders from block to block, and ranks differ for ever, as on four H200 at
their power limit. Every window of 100 steps is looked at as the router does, which remembers those
before. *Quiet* counts windows in which a fault is reported, `LOOKS` of which are an hour. Then a
fault begins, and is to be found in the first 100, 200 and 300 steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.ranks.detection import CASES, Case, places_of
from bench.ranks.played import Fault, PlayedRanks, Timing
from runtime.stragglers.rank_judge import MOST_BLOCKS, RankJudge
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, WaitWindow, joined_in_time
from runtime.stragglers.slow_ranks import Finding

LOOKS = 1800
"""Of an hour: one in 2 s."""
GROUPS = 40
"""Instances that are played at once."""
HISTORY = 12
"""Windows before a fault begins."""
DIFFER = (0.0, 0.013, 0.005, -0.02)
"""Of four H200: work before dispatch by rank, beside the median rank."""
WANDER = 0.018
"""Of them: deviation of that from block to block."""


class WatchedRanks:
    """Groups of ranks, each looked at by a judge of its own.

    Attributes:
        seen: the newest blocks of each group.
    """

    def __init__(self, num_groups: int, num_ranks: int, timing: Timing, *, seed: int) -> None:
        """Play no step yet."""
        self._ranks = PlayedRanks(num_groups, num_ranks, Fault(), seed=seed, timing=timing)
        self._judges = [RankJudge() for _ in range(num_groups)]
        self.seen: list[WaitWindow | None] = [None] * num_groups

    def break_down(self, fault: Fault) -> None:
        """Have something be wrong from now on."""
        self._ranks.break_down(fault)

    def look(self) -> list[list[Finding]]:
        """Play a window of steps, and return what is found in each group."""
        found = []
        for group, window in enumerate(self._ranks.windows(BLOCKS_OF_WINDOW)):
            before = self.seen[group]
            known = window if before is None else joined_in_time(before, window)
            known = self.seen[group] = known.newest(MOST_BLOCKS)
            found.append(self._judges[group].look(known))
        return found


def quiet(num_looks: int, num_ranks: int, timing: Timing, *, seed: int) -> tuple[int, int]:
    """Return looks, at least so many, and those in which a fault was reported."""
    groups = WatchedRanks(GROUPS, num_ranks, timing, seed=seed)
    looks = alarms = 0
    while looks < num_looks:
        found = groups.look()
        looks += len(found)
        alarms += sum(any(each.kind.is_fault for each in of_group) for of_group in found)
    return looks, alarms


def found_after(
    case: Case, num_groups: int, num_ranks: int, timing: Timing, *, seed: int
) -> list[float]:
    """Return the share of groups in which a fault was found after 100, 200 and 300 steps."""
    groups = WatchedRanks(num_groups, num_ranks, timing, seed=seed)
    for _ in range(HISTORY):
        groups.look()
    groups.break_down(case.fault)
    is_found = [False] * num_groups
    shares = []
    for _ in range(3):
        for group, found in enumerate(groups.look()):
            is_found[group] |= places_of(found) >= case.expected
        shares.append(sum(is_found) / num_groups)
    return shares


def measure(
    hours: float, num_groups: int, cases: Sequence[Case], *, wander: float, seed: int
) -> Mapping[str, object]:
    """Play it all, four ranks."""
    timing = replace(Timing(), differ=DIFFER, wander=wander, rank_spread=0.0)
    looks, alarms = quiet(int(hours * LOOKS), 4, timing, seed=seed)
    print(f"wander {wander:.1%}: {looks} looks without a fault, {alarms} alarms", flush=True)
    rows = {}
    for case in cases:
        rows[case.name] = found_after(case, num_groups, 4, timing, seed=seed + 1)
        shares = ", ".join(f"{share:.1%}" for share in rows[case.name])
        print(f"  {case.name:24s} found after 100, 200, 300 steps: {shares}", flush=True)
    return {
        "wander": wander,
        "looks": looks,
        "hours": looks / LOOKS,
        "alarms": alarms,
        "found_after_100_200_300_steps": rows,
    }


def main() -> None:
    """Print a line a case; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="without a fault")
    parser.add_argument("--groups", type=int, default=200, help="in which a fault begins")
    parser.add_argument("--case", action="append", help="name of a fault (default: all)")
    parser.add_argument("--wander", type=float, action="append", help="of attention, a block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    options = parser.parse_args()
    began, seed = time.monotonic(), options.seed * 1_000_003
    cases = [case for case in CASES[1:] if not options.case or case.name in options.case]
    rows = [
        measure(options.hours, options.groups, cases, wander=wander, seed=seed)
        for wander in options.wander or [0.012, WANDER]
    ]
    if options.json is not None:
        seconds = round(time.monotonic() - began, 1)
        options.json.write_text(json.dumps({"seconds": seconds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
