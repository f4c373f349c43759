"""What to do about unbalanced experts: a target placement, the moves to it and what they bring.

A plan is data: the planner says what it expects in *time*, and refuses what does not pay; who moves
experts follows its rounds one by one. Pure, on the host.

Each layer chooses for itself among what `experts.candidates` finds: whichever saves most
time over the passes that the load is expected to last, less the time that the moves take. So no
layer becomes slower, by the model; and what all of them save must be worth a plan.

Letters in shapes: N rows of a window, L MoE layers, E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from experts.balancedness import Balancedness, balancedness_of, copies_of, rank_rows
from experts.candidates import Choice, choose_by_layer, find_candidates
from experts.moves import order_moves
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from experts.moves import Round
    from experts.time_model import TimeModel
    from experts.trace import ExpertTrace

_SAMPLED_ROWS: Final = 12
"""Of a window, by which placements are compared: enough for the mean pass of all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the model says that a plan brings and costs.

    Attributes:
        gain: throughput after over throughput before, less 1; 0.15 is +15 %.
        num_bytes: of weights and scales that are copied between ranks.
        num_moves: experts that come to another slot.
        num_rounds: steps that flip a map, at least: one staged expert per rank and round.
        balancedness_before: of the placement now, in rows (`experts.balancedness`).
        balancedness_after: of the target.
        worst_layer_before: the least balancedness of one layer now.
        worst_layer_after: of the target.
    """

    gain: float
    num_bytes: int
    num_moves: int
    num_rounds: int
    balancedness_before: float
    balancedness_after: float
    worst_layer_before: float
    worst_layer_after: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A placement to go to, or why there is none.

    Attributes:
        target_LP: int64, the logical expert of every slot behind the last round; slot p belongs to
            rank p // (P / R). A row is what `ExpertPlacement.from_physical` takes. The placement
            of now where `refusal` says something.
        rounds: the way there, in order: each is staged (at most one expert for each receiving
            rank) and flipped at one step on all ranks. Between rounds every expert has a slot.
            One may stop behind any round. Empty where nothing is to be moved.
        expectation: what the plan brings; of a refused one, what it would have brought.
        refusal: why nothing is to be moved, with figures; empty where the plan pays.
    """

    target_LP: NDArray[np.int64]
    rounds: tuple[Round, ...]
    expectation: Expectation
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """When a plan pays.

    Attributes:
        horizon_passes: for how many passes the window's load is expected to last. Hot experts stay
            for hundreds of steps and change with the text (TensorRT-LLM's technical blog 4).
        min_gain: throughput that all moves together must bring; 0.01 is +1 %.
    """

    horizon_passes: int = 2000
    min_gain: float = 0.01


def plan_placement(
    window: ExpertTrace,
    current_LP: NDArray[np.int64],
    *,
    num_ranks: int,
    num_hosts: int = 1,
    model: TimeModel,
    terms: Terms | None = None,
) -> Plan:
    """Plan from a window of load, or say why not.

    Args:
        window: what the gate chose lately. Its own ranks and hosts do not matter.
        current_LP: int64, the logical expert of every slot of every layer now.
        num_ranks: R, of which each holds P / R slots.
        num_hosts: neighbouring ranks share a host.
        model: seconds of a pass's parts, by which everything is weighed.
        terms: when it pays; None for the defaults.

    Raises:
        ConfigError: placement and window are of different layers or experts, or sizes do not
            divide one another.
    """
    _check(window, current_LP, num_ranks, num_hosts)
    terms = terms or Terms()
    sample_NLE = sample_rows(window.counts_NLE, _SAMPLED_ROWS)
    seconds_L = partial(
        model.layer_seconds,
        sample_NLE,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        passes_per_row=window.passes_per_row,
        coactivation_LEE=window.coactivation_LEE,
    )
    each_move = model.s_per_network_move if num_hosts > 1 else model.s_per_link_move
    # Ranks receive side by side, so a layer's moves take the time of one rank's share of them.
    s_per_move = each_move / num_ranks / terms.horizon_passes
    candidates = find_candidates(
        window.counts_NLE,
        current_LP,
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        num_groups=window.num_groups,
        coactivation_LEE=window.coactivation_LEE,
    )
    choice = choose_by_layer(current_LP, candidates, seconds_L, s_per_move)
    return plan_of(
        current_LP,
        choice,
        sample_NLE,
        num_ranks=num_ranks,
        expert_bytes=window.expert_bytes,
        other=model.other_s_per_pass,
        refuse=partial(_refusal, terms),
    )


def sample_rows(counts_NLE: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most so many rows of a window, from all over it."""
    sampled = np.linspace(0, len(counts_NLE) - 1, min(len(counts_NLE), most))
    return counts_NLE[sampled.astype(np.int64)]


def plan_of(
    current_LP: NDArray[np.int64],
    choice: Choice,
    sample_NLE: NDArray[np.int64],
    *,
    num_ranks: int,
    expert_bytes: int,
    other: float,
    refuse: Callable[[Expectation], str],
) -> Plan:
    """Say how to get to what the layers chose, and what that is expected to bring.

    Args:
        current_LP: int64, the logical expert of every slot now.
        choice: of the layers.
        sample_NLE: int64, rows of the window, by which evenness is told.
        num_ranks: R.
        expert_bytes: that a move copies.
        other: what a pass costs beside the layers, in what they were chosen by.
        refuse: why it is not worth it; "" where it is.
    """
    moves_L = (choice.placement_LP != current_LP).sum(axis=1)
    # What saves most for each move comes first: one may stop behind any round.
    saved_L = choice.now_L - choice.then_L
    order = np.argsort(-saved_L / np.maximum(moves_L, 1), kind="stable")
    target_LP, rounds = order_moves(
        current_LP,
        choice.placement_LP,
        num_ranks=num_ranks,
        layers=[int(i) for i in order if moves_L[i]],
    )
    before, after = (
        balancedness_of(rank_rows(sample_NLE, placed_LP, num_ranks))
        for placed_LP in (current_LP, target_LP)
    )
    # Which slot of its rank an expert has, the way's choice, is nothing to a rank's time.
    gain = _gain(float(choice.now_L.sum()), float(choice.then_L.sum()), other)
    expectation = _expect(gain, rounds, expert_bytes, before, after)
    refusal = refuse(expectation)
    return Plan(
        target_LP=current_LP if refusal else target_LP,
        rounds=() if refusal else rounds,
        expectation=expectation,
        refusal=refusal,
    )


def _gain(before: float, after: float, other: float) -> float:
    """Throughput after over throughput before, less 1."""
    after += other
    return (before + other) / after - 1 if after > 0 else 0.0


def _expect(
    gain: float,
    rounds: tuple[Round, ...],
    expert_bytes: int,
    before: Balancedness,
    after: Balancedness,
) -> Expectation:
    num_moves = sum(map(len, rounds))
    return Expectation(
        gain=gain,
        num_bytes=num_moves * expert_bytes,
        num_moves=num_moves,
        num_rounds=len(rounds),
        balancedness_before=before.overall,
        balancedness_after=after.overall,
        worst_layer_before=before.worst_layer,
        worst_layer_after=after.worst_layer,
    )


def _refusal(terms: Terms, expectation: Expectation) -> str:
    """Why the plan does not pay; empty if it does."""
    if not expectation.num_moves:
        return (
            f"no layer would save more time in {terms.horizon_passes:,} passes than its moves "
            f"take: balancedness is {expectation.balancedness_before:.3f}, and where ranks wait "
            "for weights even rows bring nothing"
        )
    return refuse_small_gain(expectation, terms.min_gain)


def refuse_small_gain(expectation: Expectation, min_gain: float) -> str:
    """Say why a plan of moves brings too little; "" where it does not."""
    if expectation.gain >= min_gain:
        return ""
    return (
        f"expected +{expectation.gain:.1%} for {describe_cost(expectation)}, and a plan must "
        f"bring +{min_gain:.1%}: balancedness is {expectation.balancedness_before:.3f}"
    )


def describe_cost(expectation: Expectation) -> str:
    """What a plan takes, in words."""
    gigabytes = expectation.num_bytes / 1e9
    return f"{expectation.num_moves:,} moves, {gigabytes:.1f} GB, {expectation.num_rounds:,} steps"


def _check(
    window: ExpertTrace, current_LP: NDArray[np.int64], num_ranks: int, num_hosts: int
) -> None:
    layers, experts = window.num_layers, window.num_experts
    if current_LP.ndim != 2 or len(current_LP) != layers:
        problem = f"the window has {layers} layers"
        raise ConfigError("current_LP", current_LP.shape, problem, "a row for each of its layers")
    slots = current_LP.shape[1]
    for name, number, parts in (
        ("num_physical_experts", slots, num_ranks),
        ("num_ranks", num_ranks, num_hosts),
    ):
        if parts < 1 or number % parts:
            raise ConfigError(name, number, f"cannot be dealt evenly to {parts}", "a multiple")
    if not window.num_rows:
        raise ConfigError("window", "0 rows", "nothing was counted", "record at least one pass")
    if int(current_LP.min()) < 0 or int(current_LP.max()) >= experts:
        problem = f"the window has experts 0 to {experts - 1}"
        raise ConfigError("current_LP", int(current_LP.max()), problem, "a placement of its model")
    homeless = np.argwhere(copies_of(current_LP, experts) == 0)
    if len(homeless):
        layer, expert = (int(i) for i in homeless[0])
        raise ConfigError(
            "current_LP", expert, f"expert without a slot in layer {layer}", "at least one slot"
        )
