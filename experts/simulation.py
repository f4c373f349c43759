"""A trace replayed on another cluster: what its balance, its plans and redundant experts would be.

The first rows are planned from, by time or by rows as a running instance does, the others are
measured, so no plan is judged by what it was made from. Experts stand evenly at first, as an
instance without a trace places them. How many redundant experts to take is chosen by the rows
planned from, too: what they expect is told beside what came.

Letters in shapes: E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experts.balancedness import Balancedness, balancedness_of, even_placement, rank_rows
from experts.even_plan import plan_even_rows
from experts.plan import Expectation, Plan, Terms, describe_cost, plan_placement
from experts.summary import check_not_empty, floor_of
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from experts.time_model import TimeModel
    from experts.trace import ExpertTrace

Objective = Literal["time", "rows"]
"""What a plan has to better: `rebalance_objective` of a role's configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a trace is replayed on.

    Attributes:
        num_ranks: R, expert-parallel ranks.
        num_hosts: that neighbouring ranks share.
    """

    num_ranks: int
    num_hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One placement on the measured rows.

    Attributes:
        num_redundant: P - E.
        redundant_bytes_per_rank: what these take of a rank's memory, all layers.
        is_planned: whether experts stand as the plan wants them; False: dealt evenly.
        balancedness: in rows.
        floor: of uniform routing with the same batch, slots and layers.
        seconds_per_pass: modelled, of the experts' part.
        gain: throughput over that of the first outcome, less 1.
        expected_gain: the same, by the rows that were planned from.
        moved: what the plan moves; None where it moves nothing, or nothing was planned.
        refusal: why the plan moves nothing; "" where it does, or nothing was planned.
    """

    num_redundant: int
    redundant_bytes_per_rank: int
    is_planned: bool
    balancedness: Balancedness
    floor: Balancedness
    seconds_per_pass: float
    gain: float = 0.0
    expected_gain: float = 0.0
    moved: Expectation | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a trace would do on a cluster.

    Attributes:
        num_window_rows: that plans were made from.
        num_measured_rows: that everything was measured on.
        outcomes: by numbers of redundant experts, least first. Of up to two numbers experts dealt
            evenly and planned; of more the planned ones, behind those dealt evenly of the first.
            Gains are over the first.
        chosen_redundant: the number that the rows planned from speak for: the least of which no
            larger one is expected to bring a plan's least gain more.
        advice: which outcome to take and why, in a sentence.
    """

    num_window_rows: int
    num_measured_rows: int
    outcomes: tuple[Outcome, ...]
    chosen_redundant: int
    advice: str

    @property
    def chosen(self) -> Outcome:
        """The planned outcome of `chosen_redundant`."""
        planned = (outcome for outcome in self.outcomes if outcome.is_planned)
        return next(o for o in planned if o.num_redundant == self.chosen_redundant)

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def simulate(
    trace: ExpertTrace,
    cluster: Cluster,
    *,
    redundant: Sequence[int] = (0,),
    model: TimeModel,
    num_window_rows: int | None = None,
    terms: Terms | None = None,
    objective: Objective = "time",
) -> Simulation:
    """Replay a trace.

    Args:
        trace: of one role.
        cluster: to replay it on.
        redundant: numbers of redundant experts to compare, P - E; least first.
        model: of time.
        num_window_rows: to plan from; None for the first half.
        terms: when a plan pays; None for the defaults.
        objective: of plans. Gains are told in time either way.

    Raises:
        ConfigError: the cluster cannot hold the experts evenly, or the trace is too short.
    """
    check_not_empty(trace)
    window = trace.num_rows // 2 if num_window_rows is None else num_window_rows
    if not 0 < window < trace.num_rows:
        problem = f"the trace has {trace.num_rows} rows, some to plan from and some to measure"
        raise ConfigError("--window", window, problem, f"1 to {trace.num_rows - 1}")
    _check(trace.num_experts, cluster, redundant)
    terms = terms or Terms()
    parts = trace.rows(0, window), trace.rows(window, trace.num_rows)
    replay = _Replay(*parts, cluster, model, terms, objective)
    outcomes = replay.compare(redundant)
    planned = [outcome for outcome in outcomes if outcome.is_planned]
    chosen = planned[0]
    for outcome in planned[1:]:
        if outcome.expected_gain >= chosen.expected_gain + terms.min_gain:
            chosen = outcome
    return Simulation(
        num_window_rows=window,
        num_measured_rows=trace.num_rows - window,
        outcomes=outcomes,
        chosen_redundant=chosen.num_redundant,
        advice=_advise(outcomes, terms),
    )


def shared_numbers(
    num_experts: int, num_ranks: int, lowest: int = 0, highest: int | None = None
) -> tuple[int, ...]:
    """Numbers of redundant experts that ranks can share evenly with the others.

    Args:
        num_experts: E.
        num_ranks: R, 1 or more.
        lowest: of them, 0 or more.
        highest: None for those a planner tries by itself: the least, then 1, 2, 4, 8 slots more a
            rank and so on, and no more than experts.
    """
    first = lowest + -(num_experts + lowest) % num_ranks
    if highest is not None:
        return tuple(range(first, highest + 1, num_ranks))
    found, more = [first], 1
    while first + more * num_ranks <= num_experts:
        found.append(first + more * num_ranks)
        more *= 2
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Replay:
    window: ExpertTrace
    measured: ExpertTrace
    cluster: Cluster
    model: TimeModel
    terms: Terms
    objective: Objective

    def compare(self, redundant: Sequence[int]) -> tuple[Outcome, ...]:
        """Measure placements with so many redundant experts, and their gains over the first."""
        measured: list[Outcome] = []
        expected_s: list[float] = []
        for number in redundant:
            for is_planned in (False, True) if not measured or len(redundant) <= 2 else (True,):
                outcome, seconds = self.outcome(number, is_planned=is_planned)
                measured.append(outcome)
                expected_s.append(seconds)
        other = self.model.other_s_per_pass
        base, expected_base = measured[0].seconds_per_pass + other, expected_s[0] + other
        return tuple(
            replace(
                outcome,
                gain=base / (outcome.seconds_per_pass + other) - 1,
                expected_gain=expected_base / (seconds + other) - 1,
            )
            for outcome, seconds in zip(measured, expected_s, strict=True)
        )

    def outcome(self, redundant: int, *, is_planned: bool) -> tuple[Outcome, float]:
        """Measure one placement, and model the seconds of a pass in the rows planned from."""
        experts, ranks = self.window.num_experts, self.cluster.num_ranks
        slots, layers = experts + redundant, self.window.num_layers
        placement_LP = np.tile(even_placement(experts, slots, ranks), (layers, 1))
        moved, refusal = None, ""
        if is_planned:
            plan = self._plan(placement_LP)
            placement_LP, refusal = plan.target_LP, plan.refusal
            moved = None if refusal else plan.expectation
        rows_NLR = rank_rows(self.measured.counts_NLE, placement_LP, ranks)
        outcome = Outcome(
            num_redundant=redundant,
            redundant_bytes_per_rank=self.window.expert_bytes * layers * redundant // ranks,
            is_planned=is_planned,
            balancedness=balancedness_of(rows_NLR),
            floor=floor_of(self.measured, num_ranks=ranks, num_slots=slots),
            seconds_per_pass=self._seconds(self.measured, placement_LP),
            moved=moved,
            refusal=refusal,
        )
        return outcome, self._seconds(self.window, placement_LP)

    def _plan(self, current_LP: NDArray[np.int64]) -> Plan:
        if self.objective == "rows":
            return plan_even_rows(
                self.window.counts_NLE,
                current_LP,
                num_ranks=self.cluster.num_ranks,
                min_gain=self.terms.min_gain,
                expert_bytes=self.window.expert_bytes,
            )
        return plan_placement(
            self.window,
            current_LP,
            num_ranks=self.cluster.num_ranks,
            num_hosts=self.cluster.num_hosts,
            model=self.model,
            terms=self.terms,
        )

    def _seconds(self, rows: ExpertTrace, placement_LP: NDArray[np.int64]) -> float:
        """Of the experts' part of a mean pass."""
        seconds_L = self.model.layer_seconds(
            rows.counts_NLE,
            placement_LP,
            num_ranks=self.cluster.num_ranks,
            num_hosts=self.cluster.num_hosts,
            passes_per_row=rows.passes_per_row,
            coactivation_LEE=rows.coactivation_LEE,
        )
        return float(seconds_L.sum())


def _advise(outcomes: tuple[Outcome, ...], terms: Terms) -> str:
    """Say which outcome to take: redundant experts and moves only where they pay."""
    least = outcomes[0].num_redundant
    best = outcomes[0]
    for outcome in outcomes[1:]:
        if outcome.gain >= best.gain + terms.min_gain:
            best = outcome
    said = []
    more = [outcome for outcome in outcomes if outcome.num_redundant > least]
    if more and best.num_redundant == least:
        reached = max(more, key=lambda outcome: outcome.gain)
        said.append(
            f"{reached.num_redundant} redundant experts do not pay: {reached.gain:+.1%} with them, "
            f"{best.gain:+.1%} with {least}"
        )
    if not best.is_planned:
        refusals = [o.refusal for o in outcomes if o.refusal and o.num_redundant == least]
        said.append(f"leave experts where they are: {(refusals or ['no plan brings more'])[0]}")
    else:
        cost = f" for {describe_cost(best.moved)}" if best.moved else ""
        said.append(f"plan with {best.num_redundant} redundant experts: {best.gain:+.1%}{cost}")
    return "; ".join(said)


def _check(num_experts: int, cluster: Cluster, redundant: Sequence[int]) -> None:
    ranks, hosts = cluster.num_ranks, cluster.num_hosts
    if ranks < 1:
        raise ConfigError("--ranks", ranks, "no ranks", "1 or more")
    for number in redundant:
        if number < 0:
            problem = "fewer than no redundant experts"
            raise ConfigError("--redundant", number, problem, "0 or more")
        if (num_experts + number) % ranks:
            problem = f"{num_experts} experts and these are not dealt evenly to {ranks} ranks"
            fix = f"{shared_numbers(num_experts, ranks, ranks * (number // ranks))[0]}"
            raise ConfigError("--redundant", number, problem, fix)
    if hosts < 1 or ranks % hosts:
        raise ConfigError("--hosts", hosts, f"does not divide {ranks} ranks", "a divisor")
