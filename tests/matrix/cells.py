"""The cells: which fault, at which moment, of a request with which feature.

Faults, moments and features are data, and so is what cannot be. `make_cells` is a pure function of
a seed: first a covering array, in which every pair that is possible occurs, then more cells.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, fields


class Fault(enum.StrEnum):
    """What befalls the process that stands at the moment, its network or its disk."""

    KILL = "kill -9"
    STOP_A_WHILE = "SIGSTOP for 5 s"
    STOP_FOR_EVER = "SIGSTOP for ever"
    TERMINATE = "SIGTERM"
    CUT = "network cut"
    SLOW_LINK = "slow link"
    FULL_DISK = "full disk"
    NO_MEMORY = "no memory"
    CLOCK_JUMP = "clock jump"


class Moment(enum.StrEnum):
    """Where the process stands."""

    BEFORE_RESERVE = "before reserve"
    BEFORE_CLAIM = "between reserve and claim"
    TRANSFER = "during transfer"
    BEFORE_FLAG = "between part and flag"
    FIRST_TOKEN = "first token"
    MID_STREAM = "mid stream"
    DRAIN = "drain"
    SCALE = "scale"
    ROLLING_RESTART = "rolling restart"
    APPLY = "apply"
    FLIP = "flip of experts"


class Feature(enum.StrEnum):
    """What the request has that is under way."""

    DRAFTS = "drafts"
    GRAMMAR = "grammar"
    CHOICES = "n > 1"
    STOPS = "stops"
    LOGPROBS = "logprobs"
    TOOLS = "tools"
    PREFIX_HIT = "prefix hit"
    TIER = "tier"
    TENANT = "tenant"
    MIGRATION = "migration before"


OPERATIONS = frozenset({Moment.DRAIN, Moment.SCALE, Moment.ROLLING_RESTART, Moment.APPLY})
"""What an operator asks for; the process that is told to drain stands at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """Cells that cannot be: those with one of each."""

    why: str
    faults: frozenset[Fault] = frozenset(Fault)
    moments: frozenset[Moment] = frozenset(Moment)
    features: frozenset[Feature] = frozenset(Feature)


IMPOSSIBLE = (
    Impossible(
        why="the migration leaves one instance that serves, and operations need another",
        moments=OPERATIONS,
        features=frozenset({Feature.MIGRATION}),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One experiment."""

    fault: Fault
    moment: Moment
    feature: Feature

    @property
    def pairs(self) -> frozenset[tuple[str, str]]:
        """The pairs that occur in it."""
        return frozenset(itertools.combinations((self.fault, self.moment, self.feature), 2))

    @property
    def is_possible(self) -> bool:
        """Whether no rule leaves it out."""
        return not any(
            self.fault in rule.faults
            and self.moment in rule.moments
            and self.feature in rule.features
            for rule in IMPOSSIBLE
        )

    def __str__(self) -> str:
        return ", ".join(getattr(self, field.name) for field in fields(self))


def possible_cells() -> list[Cell]:
    """All that no rule leaves out."""
    every = itertools.product(Fault, Moment, Feature)
    cells = [Cell(fault=f, moment=m, feature=x) for f, m, x in every]
    return [cell for cell in cells if cell.is_possible]


def pairs_in(cells: Iterable[Cell]) -> set[tuple[str, str]]:
    """All pairs that occur."""
    return {pair for cell in cells for pair in cell.pairs}


def make_cells(seed: int, count: int = 0) -> list[Cell]:
    """Cells in which every possible pair occurs, and further ones until there are `count`."""
    draw = random.Random(seed)
    left = possible_cells()
    draw.shuffle(left)
    missing, chosen = pairs_in(left), []
    while missing:
        best = max(left, key=lambda cell: len(cell.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
        left.remove(best)
    return chosen + left[: max(0, count - len(chosen))]
