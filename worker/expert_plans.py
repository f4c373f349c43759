"""How an instance's plans of experts are made: by modelled time, or by even rows.

What the configuration asks for, joined with what runs here: the experts of this rank, its device,
how long its passes take, and on how many hosts the ranks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from prometheus_client import CollectorRegistry

from engine.experts.counted import CountedExperts
from engine.experts.group_planner import MakePlan, Numbers
from engine.experts.pass_clock import PassClock
from experts.even_plan import even_rounds
from experts.gpu_rates import CPU, GpuRates, rates_of_device
from experts.moves import Round
from experts.plan import Terms
from experts.plan_process import PlanProcess
from experts.timed_plans import PlanCounts, ServedExperts, TimedPlans
from experts.windows import LoadWindow
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError
from runtime.metrics.core import counter_of, gauge_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlans:
    """Makes the plans of an instance, on its rank 0.

    Attributes:
        make: for `engine.experts.group_planner.GroupPlanner`.
        counts: what plans by time said; None where they are not made by time.
        close: ends what computes them.
    """

    make: MakePlan
    counts: PlanCounts | None
    close: Callable[[], None]

    def watch(self, registry: CollectorRegistry) -> None:
        """Export what the latest plan expects, where time is modelled."""
        counts = self.counts
        if counts is None:
            return
        counter_of(
            registry,
            "pd_expert_rebalance_refused",
            "Plans that would not have paid by the model, so nothing moved",
            lambda: counts.num_refused,
        )
        for name, meaning, attribute in (
            ("gain", "Throughput by the model after the latest plan over before, less 1", "gain"),
            ("bytes", "Weights that the latest plan copies between ranks", "num_bytes"),
            ("rounds", "Times that all ranks change their placement for it", "num_rounds"),
        ):
            gauge_of(
                registry,
                f"pd_expert_rebalance_expected_{name}",
                f"{meaning}; of a refused one, what it would have been",
                partial(_expected, counts, attribute),
            )


def _expected(counts: PlanCounts, attribute: str) -> float:
    """0 before the first plan."""
    return 0.0 if counts.expected is None else float(getattr(counts.expected, attribute))


def open_expert_plans(
    section: PrefillSection | DecodeSection, experts: CountedExperts, clock: PassClock, *, role: str
) -> ExpertPlans:
    """Return how plans are made; every rank asks, and one is asked for plans.

    Args:
        section: of the role.
        experts: of this rank.
        clock: told of its passes.
        role: "prefill" or "decode".

    Raises:
        ConfigError: time is asked for, and nothing is known of how fast this GPU is.
    """
    min_gain, process = section.rebalance_min_gain, PlanProcess()
    if section.rebalance_objective == "rows":

        def make(window: LoadWindow, table_LP: Numbers) -> Sequence[Round]:
            num_ranks = experts.num_ranks
            return process(even_rounds, window, table_LP, num_ranks=num_ranks, min_gain=min_gain)

        return ExpertPlans(make=make, counts=None, close=process.close)
    served = ServedExperts(
        config=experts.config,
        expert_bytes=experts.expert_bytes,
        num_ranks=experts.num_ranks,
        num_hosts=equal_hosts(experts.num_ranks, section.ranks_per_host),
        role=role,
        rates=_rates(experts.placements.maps.device, f"{role}.rebalance_objective"),
    )
    # What is measured now is expected to last as long as it was measured for.
    terms = Terms(horizon_passes=section.rebalance_interval_steps, min_gain=min_gain)
    plans = TimedPlans(served, terms, clock.pass_s, process)
    return ExpertPlans(make=plans, counts=plans.counts, close=process.close)


def equal_hosts(num_ranks: int, ranks_per_host: int) -> int:
    """Return on how many hosts ranks are modelled to be: the fewest that share them equally."""
    fewest = -(-num_ranks // ranks_per_host)
    return next(hosts for hosts in range(fewest, num_ranks + 1) if num_ranks % hosts == 0)


def _rates(device: torch.device, field: str) -> GpuRates:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU.name
    rates = rates_of_device(name)
    if rates is None:
        problem = f"there is no data sheet of {name!r} to model its time by"
        raise ConfigError(field, "time", problem, '"rows", or add it to experts/data_sheets.py')
    return rates
