"""What a report says of experts: how even ranks were before and after, what moved, and which steps
were slow beside which turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from bench.engine.method import Run
from bench.engine.moving import FLIP, Stretch, WatchedExperts
from bench.engine.options import Setup
from bench.engine.report import Report, Tail
from bench.engine.session import Session
from bench.engine.timing import Measurement
from engine.experts.counted import CountedExperts
from engine.experts.rebalancer import Stage
from experts.balancedness import balancedness_of, rank_rows
from experts.noise_floor import Routing, noise_floor
from experts.trace import ExpertTrace

SLOW: Final = 1.02
"""Times the median: steps beyond it are counted."""
_MOVING: Final = (Stage.FREE.value, Stage.SENDING.value, Stage.CHECKING.value, FLIP)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """A stretch of passes, summed over all ranks.

    Attributes:
        counts_NLE: what experts got.
        table_LP: where they stood.
    """

    counts_NLE: npt.NDArray[np.int64]
    table_LP: npt.NDArray[np.int64]


def look_back(
    session: Session, setup: Setup, run: Run, watched: WatchedExperts | None, *, role: str
) -> Report:
    """Of slow steps and of experts, and let go of what moved them; all ranks call."""
    if watched is None:
        return {"step_tail_ms": describe_tails(run.of_rank_0.step_s)} if session.is_first else {}
    session.rank.meet()  # nothing of a copy is under way
    told: Report = {"experts": describe_experts(session, watched, role=role, setup=setup)}
    watched.close()
    if session.is_first:
        steps = run.of_rank_0
        told["step_tail_ms"] = describe_tails(steps.step_s, kinds_of(watched, steps))
    return told


def gather_passes(session: Session, stretch: Stretch | None) -> Passes | None:
    """Add the passes of all ranks up; all ranks call.

    Returns:
        None where some rank has none, or ranks have other ones.
    """
    windows = [] if stretch is None else stretch.windows
    first = windows[0].first_pass if windows else -1
    told = session.gather([first, len(windows)])
    fewest = int(min(count for _, count in told))
    if stretch is None or not fewest or len({number for number, _ in told}) > 1:
        return None
    own = np.stack([window.counts_LE for window in windows[:fewest]])
    group = session.rank.groups.boot_group
    summed = group.all_gather(torch.from_numpy(own)[None]).sum(dim=0).numpy()
    return Passes(counts_NLE=summed, table_LP=stretch.table_LP)


def describe_experts(
    session: Session, watched: WatchedExperts, *, role: str, setup: Setup
) -> Report:
    """What moved and what it brought; all ranks call, rank 0 says it."""
    before, after = (gather_passes(session, part) for part in (watched.before, watched.after))
    mover = watched.rebalancer
    num_bytes = session.gather([0 if mover is None else mover.counts.num_bytes])
    from_host = session.gather([0 if mover is None else mover.counts.num_host_moves])
    experts = watched.experts
    if session.is_first and setup.record_load and before is not None:
        path = Path(setup.record_load)
        path.parent.mkdir(parents=True, exist_ok=True)
        trace_of(before, experts, role=role, model_name=Path(setup.shape).name).save(path)
    told: Report = {
        "before": None if before is None else describe_passes(before, experts),
        "after": None if after is None else describe_passes(after, experts),
        "moves": None,
    }
    if watched.moving is not None and mover is not None:
        plans, counts = watched.moving.plans, mover.counts
        expected = None if plans is None or plans.counts is None else plans.counts.expected
        told["moves"] = {
            "plans": counts.num_plans,
            "refused": None if plans is None or plans.counts is None else plans.counts.num_refused,
            "rounds": counts.num_rounds,
            "experts": counts.num_moves,
            "experts_from_host": int(sum(row[0] for row in from_host)),
            "bytes_received": int(sum(row[0] for row in num_bytes)),
            "retreats": counts.num_retreats,
            "last_retreat": mover.last_retreat,
            "epoch": mover.epoch,
            "problem": mover.problem,
            "latest_plan_expects": None if expected is None else dataclasses.asdict(expected),
        }
    return told


def describe_passes(passes: Passes, experts: CountedExperts) -> Report:
    """How even the passes were, beside what a router without preference would have reached."""
    config, counts_NLE = experts.config, passes.counts_NLE
    even = balancedness_of(rank_rows(counts_NLE, passes.table_LP, experts.num_ranks))
    tokens = float(counts_NLE[:, 0].sum()) / config.num_experts_per_tok / len(counts_NLE)
    floor = noise_floor(
        Routing.of(config),
        tokens_per_pass=tokens,
        num_ranks=experts.num_ranks,
        num_slots=passes.table_LP.shape[1],
        num_layers=counts_NLE.shape[1],
        num_passes=len(counts_NLE),
    )
    return {
        "passes": len(counts_NLE),
        "tokens_per_pass": tokens,
        "balancedness": even.overall,
        "of_floor": even.overall / floor.overall,
        "worst_layer": even.worst_layer,
        "worst_layer_of_floor": even.worst_layer / floor.worst_layer,
        "floor": floor.overall,
    }


def trace_of(passes: Passes, experts: CountedExperts, *, role: str, model_name: str) -> ExpertTrace:
    """The passes as a recording of a cluster that served this model."""
    config, counts_NLE = experts.config, passes.counts_NLE
    return ExpertTrace(
        counts_NLE=counts_NLE,
        tokens_N=counts_NLE[:, 0].sum(axis=1) // config.num_experts_per_tok,
        role=role,
        model_name=model_name,
        top_k=config.num_experts_per_tok,
        num_groups=config.n_group,
        topk_group=config.topk_group,
        num_ranks=experts.num_ranks,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        expert_bytes=experts.expert_bytes,
        num_draft_layers=experts.num_draft_layers,
    )


def kinds_of(watched: WatchedExperts, steps: Measurement) -> Sequence[str]:
    """What each measured step ran beside."""
    return watched.kinds[steps.first_step : steps.first_step + steps.num_steps]


def describe_tails(step_s: Sequence[float], kinds: Sequence[str] = ()) -> Report:
    """How slow the slowest steps are, all of them and by what they ran beside."""
    median = sorted(step_s)[len(step_s) // 2]
    parts: dict[str, list[float]] = {"all": list(step_s)}
    for seconds, kind in zip(step_s, kinds, strict=False):
        parts.setdefault(kind, []).append(seconds)
        if kind in _MOVING:
            parts.setdefault("moving", []).append(seconds)
    return {
        name: {
            **dataclasses.asdict(Tail.of(part)),
            "slower": sum(seconds > SLOW * median for seconds in part),
        }
        for name, part in parts.items()
    }
