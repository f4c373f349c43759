"""How many drafts the next step of a group verifies: where the most tokens per second are expected.

The rule is that of adaptive verification in DSpark (arXiv 2607.05147), for one number a step: a
captured step has as many rows for every request. The tokens to be expected are the sum of what each
request would give (`draft_survival`), the seconds are what such a step takes (`draft_costs`): the
number with the best ratio is taken, none included. It is kept until another has been better for as
long as it takes to tell that from noise, and now and then a neighbour is tried for a few steps:
costs and shares of numbers that are never run would be unknown, and none for ever would be right by
accident.

All ranks of a group take the same number. Each says what it expects in the message before a step
(`engine.parallel.lockstep`), and how long its latest step took; what follows is a function of these
messages, in their order, and of the table that they shared at the start. An idle rank expects
nothing and hears the same. Used by the thread of the engine loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from decode.draft_costs import Costs, StepCosts
from decode.draft_survival import DraftSurvival
from engine.draft_choices import DraftChoices
from engine.graphs.buckets import bucket_for
from engine.pending_step import StepResult
from engine.request import Request

BETTER_BY = 0.12
"""A number is left for one whose ratio is better by this share, added up over steps."""
AS_GOOD = 0.003
"""A share by which a ratio may be better without being so; taken off in each of them."""
LEAST_STEPS = 8
"""With a number, before another one is taken."""
FIRST_TRIAL = 32
"""Steps to the first trial of a neighbour. To the next ones it is twice as many each time."""
TRY_EVERY = 256
"""The most of them."""
TRY_STEPS = 3
"""Of a trial: the first one makes the drafts that the others verify."""
HOPELESS = 0.75
"""A neighbour whose ratio is said to be this share of the best, or less, is tried more rarely."""
RARELY = 8
"""Trials that such a neighbour sits out."""

_MILLI = 1000
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedStep:
    """A step that was launched.

    Attributes:
        num_drafts: of every request.
        size: of the group's step.
    """

    num_drafts: int
    size: int


class DraftBudget:
    """The chooser of one rank; see the module."""

    def __init__(self, choices: DraftChoices, sizes: Sequence[int], costs: Costs) -> None:
        """Begin with the costs that all ranks of the group have.

        Args:
            choices: what there is to choose from: every number from 0.
            sizes: of steps, ascending.
            costs: of each of them, by number of drafts.
        """
        assert choices.numbers == tuple(range(choices.most + 1)), choices.numbers
        self._choices, self._sizes = choices, tuple(sizes)
        self._costs = StepCosts(costs)
        self._survival = DraftSurvival(choices.most)
        self._rule = _Rule()
        self._expected: list[float] = [0.0] * (choices.most + 1)
        self._observed = (0, 0, 0)
        self._size = self._sizes[0]

    @property
    def num_drafts(self) -> int:
        """Of the step that the group has just agreed on."""
        return self._rule.num_drafts

    @property
    def width(self) -> int:
        """Whole numbers of what a rank says."""
        return self._choices.most + 4

    def plan(self, requests: Sequence[Request]) -> None:
        """These run in our part of the next step; none of an idle rank."""
        bound = [one for one in requests if one.sampling.constraint is not None]
        free = [one for one in requests if one.sampling.constraint is None] if bound else requests
        self._expected = [tokens + len(bound) for tokens in self._survival.expected(free)]

    def say(self) -> list[int]:
        """Return what this rank expects of each number of drafts, and its latest step's time."""
        observed, self._observed = self._observed, (0, 0, 0)
        return [*(round(tokens * _MILLI) for tokens in self._expected), *observed]

    def hear(self, rows: Sequence[Sequence[int]], most_requests: int) -> None:
        """Agree with the other ranks on the next step's number.

        Args:
            rows: what each rank said, in the order of ranks.
            most_requests: of a rank in that step; 0 where there is no step.
        """
        self._take_times([row[-3:] for row in rows])
        if not most_requests:
            return
        self._size = bucket_for(min(most_requests, self._sizes[-1]), self._sizes)
        numbers = self._choices.of(self._size)
        costs = self._costs.of(self._size)
        expected = [sum(row[count] for row in rows) for count in numbers]
        ratios = [tokens / costs[count] for count, tokens in zip(numbers, expected, strict=True)]
        self._rule.choose(ratios)

    def launch(self) -> DraftedStep:
        """Our part of that step is launched."""
        return DraftedStep(num_drafts=self.num_drafts, size=self._size)

    def book(self, step: DraftedStep, results: Sequence[StepResult], seconds: float) -> None:
        """A step is over.

        Args:
            step: as it was launched.
            results: of this rank's requests.
            seconds: that it took.
        """
        for result in results:
            # One without a token failed; behind a step without drafts there were none to verify.
            if result.sampled is not None:
                self._survival.saw(result.request, result.num_verified, len(result.more))
        if any(result.max_drafts != step.num_drafts for result in results[:1]):
            return  # it was not of fixed shape, and its time says nothing of those that are
        self._observed = (step.size, step.num_drafts, max(round(seconds * _MICRO), 1))

    def _take_times(self, observed: Sequence[Sequence[int]]) -> None:
        """Take the mean of what the ranks say of a kind of step: they ran it together."""
        times: dict[tuple[int, int], list[float]] = {}
        for size, num_drafts, micros in observed:
            if micros:
                times.setdefault((size, num_drafts), []).append(micros / _MICRO)
        for (size, num_drafts), seconds in sorted(times.items()):
            self._costs.observe(size, num_drafts, fmean(seconds))


class _Rule:
    """From ratios to a number: what is best, but for noise and trials."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self._kept: int | None = None  # the number to which a trial returns
        self._since = 0
        self._leads: list[float] = []  # of each number, what it was better by than the kept one
        self._interval = self._until_trial = FIRST_TRIAL
        self._trial_left = 0
        self._num_trials = 0

    def choose(self, ratios: Sequence[float]) -> None:
        """Take the next step's number, of those from 0 that have a ratio."""
        best = max(range(len(ratios)), key=lambda count: ratios[count])
        if self._kept is None or self._kept >= len(ratios):
            kept = self._keep(best)  # at first, and where the step has become too large
        else:
            kept = self._kept
            if self._is_better(best, kept, ratios) and self._since >= LEAST_STEPS:
                kept = self._keep(best)
        self._since += 1
        self.num_drafts = self._try(kept, ratios)

    def _is_better(self, best: int, kept: int, ratios: Sequence[float]) -> bool:
        """Note by what numbers are better than the kept one; whether the best is, for long."""
        before = self._leads + [0.0] * (len(ratios) - len(self._leads))
        self._leads = [
            max(lead + ratio / ratios[kept] - 1 - AS_GOOD, 0.0)
            for lead, ratio in zip(before, ratios, strict=False)
        ]
        return self._leads[best] > BETTER_BY

    def _keep(self, number: int) -> int:
        self._kept, self._since, self._trial_left = number, 0, 0
        self._leads.clear()
        return number

    def _try(self, kept: int, ratios: Sequence[float]) -> int:
        """Return the number that is kept, or during a trial a neighbour of it."""
        if self._trial_left and self.num_drafts < len(ratios):
            self._trial_left -= 1
            return self.num_drafts
        self._trial_left = 0
        self._until_trial -= 1
        if self._until_trial > 0:
            return kept
        self._interval = min(2 * self._interval, TRY_EVERY)
        self._until_trial = self._interval
        self._num_trials += 1
        tried = kept + (1 if self._num_trials % 2 else -1)
        if not 0 <= tried < len(ratios):
            tried = 2 * kept - tried
        if not 0 <= tried < len(ratios):
            return kept
        is_hopeless = ratios[tried] <= HOPELESS * ratios[kept]
        if is_hopeless and self._num_trials % (2 * RARELY) > 1:
            return kept
        self._trial_left = TRY_STEPS - 1
        return tried


def agreed_costs(rows: Sequence[Costs]) -> Mapping[int, Sequence[float]]:
    """Return the costs of a group: of every kind of step those of the slowest rank."""
    first = rows[0]
    return {
        size: [max(row[size][count] for row in rows) for count in range(len(first[size]))]
        for size in first
    }
