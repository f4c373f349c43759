"""Minutes and hours of steps without a fault, in which the router's judge should say nothing.

They run in parts, each gathered behind its last step, looked at as often as a router looks, and
told of at once, so that a run that is broken off has said something, and a long one needs no more
memory than a short one. A host may have a rank that is slower for ever, which is no false alarm:
each part says what the ranks' own work is beside the others'. Of a slower rank all parts say so.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.engine.report import Report, say
from bench.ranks.faults import Place
from bench.ranks.judged import (
    Blocks,
    JudgedBlocks,
    alarms_of,
    longest_alarm,
    show_looks,
)
from bench.ranks.live import LiveRank, Stretch
from engine.graphs.graph_runner import GraphRunner
from router.pool.rank_watch import LOOK_S
from runtime.stragglers.rank_waits import STEPS_OF_BLOCK, Floats, Phase
from runtime.stragglers.slow_ranks import Finding

PART_S = 60.0
"""Of steps, between two lines of what was found."""


@dataclass(slots=True, kw_only=True)
class QuietLog:
    """What is kept of the parts on rank 0.

    Attributes:
        judged: looks at their blocks.
        looks: findings of each.
        look_s: [looks] seconds of steps that each look came behind the one before.
        parts: described.
        own_s: [parts] of [P, R], the median block's own work of a step.
        dispatch_s: [parts] of [B, R], of each block before dispatch.
        num_steps: of all parts.
        seconds: of them.
    """

    judged: JudgedBlocks
    looks: list[Sequence[Finding]] = field(default_factory=list)
    look_s: list[float] = field(default_factory=list)
    parts: list[Report] = field(default_factory=list)
    own_s: list[Floats] = field(default_factory=list)
    dispatch_s: list[Floats] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0

    def add(self, part: Stretch, resident_mib: Sequence[float]) -> str:
        """Look at a part; return the line that tells of it.

        Args:
            part: that has run.
            resident_mib: memory of each rank's process behind it.
        """
        mean_s = sum(part.step_s) / len(part.step_s)
        every = max(1, round(LOOK_S / (STEPS_OF_BLOCK * mean_s)))
        looks = self.judged.hear(part.blocks, every=every)
        self.looks += looks
        self.look_s += [every * STEPS_OF_BLOCK * mean_s] * len(looks)
        self.num_steps += len(part.step_s)
        self.seconds += sum(part.step_s)
        own = _own_of(part.blocks)  # [B, P, R]
        self.own_s.append(median_own_s(part.blocks))
        self.dispatch_s.append(own[:, Phase.DISPATCH])
        faults = [[each for each in found if each.kind.is_fault] for found in looks]
        num_faulty = sum(map(bool, faults))
        beside = beside_others(self.own_s[-1])
        self.parts.append(
            {
                "until_s": round(self.seconds, 1),
                "steps": len(part.step_s),
                "step_ms": round(1e3 * part.median_s, 3),
                "windows": len(looks),
                "windows_with_a_fault": num_faulty,
                "own_us": _by_phase(1e6 * self.own_s[-1], 1),
                "own_beside_others": _by_phase(beside, 4),
                "resident_mib": [round(each, 1) for each in resident_mib],
            }
        )
        shown = ", ".join(f"{each:+.1%}" for each in beside[Phase.DISPATCH])
        return (
            f"{self.seconds:.0f} s: {len(part.step_s)} steps of {1e3 * part.median_s:.2f} ms, "
            f"{len(looks)} windows, {num_faulty} with a fault: {show_looks(faults)}; "
            f"work before dispatch beside others {shown}; {max(resident_mib):.0f} MiB"
        )

    def report(self) -> Report:
        """Return all that was seen."""
        return {
            "seconds": self.seconds,
            "steps": self.num_steps,
            "windows": len(self.looks),
            "alarms": alarms_of(self.looks, frozenset()),
            "longest_alarm_s": longest_alarm(self.looks) * max(self.look_s, default=0.0),
            "places": [self._place(place) for place in sorted(_places_of(self.looks))],
            "parts": self.parts,
            "noise": _noise_of(np.concatenate(self.dispatch_s)),
        }

    def _place(self, place: Place) -> Report:
        """Return how often it was found, and what the rank's own work was beside the others'."""
        kind, rank, source = place
        here = [
            [each for each in found if (each.kind, each.rank, each.source) == place]
            for found in self.looks
        ]
        beside = np.array([beside_others(own)[:, rank] for own in self.own_s])  # [parts, P]
        quantiles = np.quantile(beside, (0.0, 0.5, 1.0), axis=0).T  # [P, 3]
        return {
            "kind": kind.value,
            "rank": rank,
            "source": source,
            "windows": sum(map(bool, here)),
            "longest_s": longest_alarm(here) * max(self.look_s, default=0.0),
            "ratio": float(np.median([each.ratio for found in here for each in found])),
            "own_beside_others_least_median_most": _by_phase(quantiles, 4),
        }


def run_quiet(
    live: LiveRank, runner: GraphRunner, usual: Blocks, *, seconds: float, num_steps: int
) -> Report:
    """Run steps without a fault; all ranks call. Only rank 0's report is of findings.

    Args:
        live: the rank.
        runner: that was captured.
        usual: blocks that ran before.
        seconds: of steps, at least.
        num_steps: of a part, at least.
    """
    log = QuietLog(judged=JudgedBlocks(usual))
    rank = live.session.rank.place.rank
    while True:
        # All ranks go by rank 0's clock: they must agree on who is the last part's.
        (left_s, *_), *_ = live.session.gather([seconds - log.seconds])
        if left_s <= 0.0 and log.parts:
            return log.report()
        part_s = min(PART_S, max(0.0, left_s))
        part = live.run(runner, num_steps=num_steps, seconds=part_s)
        resident = live.session.gather([resident_mib()])
        say(log.add(part, [row[0] for row in resident]), rank=rank)


def resident_mib() -> float:
    """Return what this process has of memory just now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize() / 2**20


def median_own_s(blocks: Blocks) -> Floats:
    """Return [P, R]: what each rank did by itself in a step of the median block."""
    return np.asarray(np.median(_own_of(blocks), axis=0))


def beside_others(own_s: Floats) -> Floats:
    """Return [P, R]: own work over that of the lower median rank, which the judge compares with.

    Args:
        own_s: [P, R] of a step.
    """
    ordered = np.sort(own_s, axis=1)
    usual = ordered[:, (own_s.shape[1] - 1) // 2 : (own_s.shape[1] - 1) // 2 + 1]
    return np.asarray(own_s / np.maximum(usual, 1e-12) - 1.0)


def _own_of(blocks: Blocks) -> Floats:
    own = [[block.own_s for block in blocks[rank]] for rank in sorted(blocks)]  # R, B, P
    return np.array(own).transpose(1, 2, 0)


def _by_phase(figures: Floats, digits: int) -> Report:
    return {phase.name.lower(): figures[phase].round(digits).tolist() for phase in Phase}


def _places_of(looks: Sequence[Sequence[Finding]]) -> set[Place]:
    return {
        (each.kind, each.rank, each.source)
        for found in looks
        for each in found
        if each.kind.is_fault
    }


def _noise_of(own_s: Floats) -> Report:
    """Return how work before dispatch, [B, R], varies, for simulations: in us."""
    beside = own_s - np.median(own_s, axis=1, keepdims=True)
    return {
        "dispatch_us": (1e6 * own_s.T).round(1).tolist(),
        "beside_median_rank_us": (1e6 * beside.std(axis=0)).round(1).tolist(),
    }


def show_quiet(quiet: Report) -> None:
    """Print what was found, and whether the rank is slower by itself."""
    alarms, places, parts = quiet["alarms"], quiet["places"], quiet["parts"]
    assert isinstance(alarms, list)
    assert isinstance(places, list)
    assert isinstance(parts, list)
    print(
        f"no fault: {quiet['steps']} steps, {quiet['seconds']:.0f} s, {quiet['windows']} windows, "
        f"{len(alarms)} false alarms"
    )
    for place in places:
        source = f" from {place['source']}" if place["source"] >= 0 else ""
        least, median, most = place["own_beside_others_least_median_most"]["dispatch"]
        print(
            f"  {place['kind']} {place['rank']}{source}: {place['windows']} windows, "
            f"{place['longest_s']:.0f} s on end; its work before dispatch is beside the others' "
            f"{median:+.1%} in the median of {len(parts)} parts ({least:+.1%} to {most:+.1%})"
        )
