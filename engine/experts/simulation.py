"""A trace replayed on another cluster: what its balance, its plans and redundant experts would be.

The first rows are planned from, the others are measured, so no plan is judged by what it was made
from. Experts stand evenly at first, as an instance without a trace places them.

Letters in shapes: E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.experts.balancedness import Balancedness, balancedness_of, even_placement, rank_rows
from engine.experts.plan import Plan, Terms, describe_cost, plan_placement
from engine.experts.summary import check_not_empty, floor_of
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.experts.time_model import TimeModel
    from engine.experts.trace import ExpertTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a trace is replayed on.

    Attributes:
        num_ranks: R, expert-parallel ranks.
        num_redundant: P - E, slots beyond one for each expert.
        num_hosts: that neighbouring ranks share.
    """

    num_ranks: int
    num_redundant: int = 0
    num_hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One placement on the measured rows.

    Attributes:
        num_redundant: P - E.
        is_planned: whether experts were moved by the plan; False: dealt evenly.
        balancedness: in rows.
        floor: of uniform routing with the same batch, slots and layers.
        seconds_per_pass: modelled, of the experts' part.
        gain: throughput over that of the first outcome, less 1.
        moves: "" or what the plan takes, in words.
        num_moves: experts that change their slot.
        num_bytes: copied for it.
        num_rounds: steps that flip a map.
        refusal: why the plan moves nothing; "" where it does, or nothing was planned.
    """

    num_redundant: int
    is_planned: bool
    balancedness: Balancedness
    floor: Balancedness
    seconds_per_pass: float
    gain: float
    moves: str = ""
    num_moves: int = 0
    num_bytes: int = 0
    num_rounds: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a trace would do on a cluster.

    Attributes:
        num_window_rows: that plans were made from.
        num_measured_rows: that everything was measured on.
        outcomes: experts dealt evenly and planned, without redundant experts where ranks can share
            the experts, then with them; gains are over the first.
        redundant_bytes_per_rank: what redundant experts take of a rank's memory, all layers.
        advice: which outcome to take and why, in a sentence.
    """

    num_window_rows: int
    num_measured_rows: int
    outcomes: tuple[Outcome, ...]
    redundant_bytes_per_rank: int
    advice: str

    def describe(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def simulate(
    trace: ExpertTrace,
    cluster: Cluster,
    *,
    model: TimeModel,
    num_window_rows: int | None = None,
    terms: Terms | None = None,
) -> Simulation:
    """Replay a trace.

    Args:
        trace: of one role.
        cluster: to replay it on.
        model: of time.
        num_window_rows: to plan from; None for the first half.
        terms: when a plan pays; None for the defaults.

    Raises:
        ConfigError: the cluster cannot hold the experts evenly, or the trace is too short.
    """
    check_not_empty(trace)
    window = trace.num_rows // 2 if num_window_rows is None else num_window_rows
    if not 0 < window < trace.num_rows:
        problem = f"the trace has {trace.num_rows} rows, some to plan from and some to measure"
        raise ConfigError("--window", window, problem, f"1 to {trace.num_rows - 1}")
    _check(trace.num_experts, cluster)
    replay = _Replay(trace.rows(0, window), trace.rows(window, trace.num_rows), cluster, model)
    outcomes: list[Outcome] = []
    choices = {0, cluster.num_redundant}
    for redundant in sorted(choices):
        if not (trace.num_experts + redundant) % cluster.num_ranks:
            outcomes += replay.outcomes(redundant, terms)
    other, base = model.other_s_per_pass, outcomes[0].seconds_per_pass
    gained = tuple(
        _with_gain(outcome, (base + other) / (outcome.seconds_per_pass + other) - 1)
        for outcome in outcomes
    )
    each = trace.expert_bytes * trace.num_layers
    return Simulation(
        num_window_rows=window,
        num_measured_rows=trace.num_rows - window,
        outcomes=gained,
        redundant_bytes_per_rank=each * cluster.num_redundant // cluster.num_ranks,
        advice=_advise(gained, terms or Terms()),
    )


@dataclass(frozen=True, slots=True)
class _Replay:
    window: ExpertTrace
    measured: ExpertTrace
    cluster: Cluster
    model: TimeModel

    def outcomes(self, redundant: int, terms: Terms | None) -> list[Outcome]:
        """Dealt evenly, and planned."""
        experts, ranks = self.window.num_experts, self.cluster.num_ranks
        slots = experts + redundant
        even_LP = np.tile(even_placement(experts, slots, ranks), (self.window.num_layers, 1))
        floor = floor_of(self.measured, num_ranks=ranks, num_slots=slots)
        plan = plan_placement(
            self.window,
            even_LP,
            num_ranks=ranks,
            num_hosts=self.cluster.num_hosts,
            model=self.model,
            terms=terms,
        )
        return [
            self._measure(even_LP, redundant, floor, None),
            self._measure(plan.target_LP, redundant, floor, plan),
        ]

    def _measure(
        self,
        placement_LP: NDArray[np.int64],
        redundant: int,
        floor: Balancedness,
        plan: Plan | None,
    ) -> Outcome:
        counts_NLE, ranks = self.measured.counts_NLE, self.cluster.num_ranks
        seconds_L = self.model.layer_seconds(
            counts_NLE,
            placement_LP,
            num_ranks=ranks,
            num_hosts=self.cluster.num_hosts,
            passes_per_row=self.measured.passes_per_row,
            coactivation_LEE=self.measured.coactivation_LEE,
        )
        moved = plan.expectation if plan is not None and not plan.refusal else None
        return Outcome(
            num_redundant=redundant,
            is_planned=plan is not None,
            balancedness=balancedness_of(rank_rows(counts_NLE, placement_LP, ranks)),
            floor=floor,
            seconds_per_pass=float(seconds_L.sum()),
            gain=0.0,
            moves=describe_cost(moved) if moved else "",
            num_moves=moved.num_moves if moved else 0,
            num_bytes=moved.num_bytes if moved else 0,
            num_rounds=moved.num_rounds if moved else 0,
            refusal=plan.refusal if plan else "",
        )


def _with_gain(outcome: Outcome, gain: float) -> Outcome:
    fields = {name: getattr(outcome, name) for name in Outcome.__slots__}
    return Outcome(**(fields | {"gain": gain}))


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
        reached = max(outcome.gain for outcome in more)
        said.append(
            f"{more[0].num_redundant} redundant experts do not pay: {reached:+.1%} with them, "
            f"{best.gain:+.1%} with {least}"
        )
    if not best.is_planned:
        refusals = [o.refusal for o in outcomes if o.refusal and o.num_redundant == least]
        said.append(f"leave experts where they are: {(refusals or ['no plan brings more'])[0]}")
    else:
        cost = f" for {best.moves}" if best.moves else ""
        said.append(f"plan with {best.num_redundant} redundant experts: {best.gain:+.1%}{cost}")
    return "; ".join(said)


def _check(num_experts: int, cluster: Cluster) -> None:
    ranks, redundant, hosts = cluster.num_ranks, cluster.num_redundant, cluster.num_hosts
    if ranks < 1:
        raise ConfigError("--ranks", ranks, "no ranks", "1 or more")
    if redundant < 0:
        raise ConfigError("--redundant", redundant, "fewer than no redundant experts", "0 or more")
    if (num_experts + redundant) % ranks:
        problem = f"{num_experts} experts and these are not dealt evenly to {ranks} ranks"
        fix = f"{-num_experts % ranks + ranks * (redundant // ranks)}"
        raise ConfigError("--redundant", redundant, problem, fix)
    if hosts < 1 or ranks % hosts:
        raise ConfigError("--hosts", hosts, f"does not divide {ranks} ranks", "a divisor")
