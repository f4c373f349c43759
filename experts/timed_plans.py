"""Plans of a running instance by modelled time, and what they expect.

The model is made of what is served: the sizes and the routing of its experts, the bytes that one
takes as it is kept, the rates of the device (`experts.gpu_rates`), the ranks and hosts that
share experts. Passes are then fitted to how long they take (`TimeModel.fitted`), so that a gain is
one of whole steps.

Only the rank that plans for its group has plans and figures; the others are told the rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experts.gpu_rates import GpuRates
from experts.moe_sizes import MoESizes
from experts.moves import Round
from experts.plan import Expectation, Terms, plan_placement
from experts.plan_process import Compute, compute_here
from experts.time_model import TimeModel
from experts.told_rounds import ToldRounds
from experts.trace import ExpertTrace
from experts.windows import LoadWindow
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedExperts:
    """What is known of an instance before it serves.

    Attributes:
        config: sizes and routing.
        expert_bytes: of one expert's weights and scales in one layer, as a rank keeps them.
        num_ranks: that share the experts of a layer.
        num_hosts: that neighbouring ranks share.
        role: "prefill" or "decode".
        rates: of a rank's device.
    """

    config: MoESizes
    expert_bytes: int
    num_ranks: int
    num_hosts: int
    role: str
    rates: GpuRates

    def trace_of(self, window: LoadWindow) -> ExpertTrace:
        """Return a window as a trace of one row."""
        config = self.config
        counts_LE = np.ascontiguousarray(window.counts_LE, dtype=np.int64)
        # Tokens were not counted; layers that draft may have had more than the others.
        tokens = -(-int(counts_LE.sum(axis=1).max(initial=0)) // config.num_experts_per_tok)
        return ExpertTrace(
            counts_NLE=counts_LE[None],
            tokens_N=np.array([tokens], dtype=np.int64),
            role=self.role,
            model_name="",
            top_k=config.num_experts_per_tok,
            num_groups=config.n_group,
            topk_group=config.topk_group,
            num_ranks=self.num_ranks,
            num_hosts=self.num_hosts,
            passes_per_row=window.num_passes,
            hidden_size=config.hidden_size,
            moe_intermediate_size=config.moe_intermediate_size,
            expert_bytes=self.expert_bytes,
        )


@dataclass(slots=True)
class PlanCounts:
    """What plans said; read by other threads.

    Attributes:
        num_refused: plans that did not pay.
        expected: of the latest plan, refused or not; None before the first.
    """

    num_refused: int = 0
    expected: Expectation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """What is to be told of a plan.

    Attributes:
        rounds: none where it does not pay.
        expectation: see `experts.plan.Plan`.
        refusal: the same.
        source: where times are from, for the log.
    """

    rounds: ToldRounds
    expectation: Expectation
    refusal: str
    source: dict[str, object]


class TimedPlans:
    """Makes the plans of a group; see `engine.experts.group_planner.MakePlan`.

    Attributes:
        counts: so far.
    """

    def __init__(
        self,
        served: ServedExperts,
        terms: Terms,
        pass_s: Callable[[], float | None],
        compute: Compute = compute_here,
    ) -> None:
        """Know what is served.

        Args:
            served: of the instance.
            terms: when a plan pays.
            pass_s: seconds of a pass lately; None where too few were made.
            compute: where plans are computed.
        """
        self._served, self._terms, self._pass_s = served, terms, pass_s
        self._compute = compute
        self.counts = PlanCounts()

    def __call__(self, window: LoadWindow, table_LP: npt.NDArray[np.int64]) -> Sequence[Round]:
        """Plan, and say what is expected; no round where a plan does not pay."""
        if not window.counts_LE.any():
            return ()  # steps without a request's token
        plan = self._compute(
            plan_by_time, self._served, self._terms, window, table_LP, self._pass_s()
        )
        self.counts.expected = plan.expectation
        self.counts.num_refused += bool(plan.refusal)
        _tell(plan)
        return plan.rounds


def plan_by_time(
    served: ServedExperts,
    terms: Terms,
    window: LoadWindow,
    table_LP: npt.NDArray[np.int64],
    pass_s: float | None,
) -> TimedPlan:
    """Plan from a window of all ranks.

    Args:
        served: of the instance.
        terms: when a plan pays.
        window: with tokens.
        table_LP: the expert of every slot now.
        pass_s: seconds of a pass lately; None where that is not known.
    """
    trace = served.trace_of(window)
    model, source = _model(served, trace, table_LP, pass_s)
    plan = plan_placement(
        trace,
        table_LP,
        num_ranks=served.num_ranks,
        num_hosts=served.num_hosts,
        model=model,
        terms=terms,
    )
    return TimedPlan(
        rounds=ToldRounds.of(plan.rounds),
        expectation=plan.expectation,
        refusal=plan.refusal,
        source=source,
    )


def _model(
    served: ServedExperts,
    trace: ExpertTrace,
    table_LP: npt.NDArray[np.int64],
    pass_s: float | None,
) -> tuple[TimeModel, dict[str, object]]:
    """Return the model of a pass, and for the log where its times are from."""
    model = TimeModel.of_trace(trace, served.rates)
    experts_s = float(
        model.layer_seconds(
            trace.counts_NLE,
            table_LP,
            num_ranks=served.num_ranks,
            num_hosts=served.num_hosts,
            passes_per_row=trace.passes_per_row,
        ).sum()
    )
    source: dict[str, object] = {"rates": served.rates.name, "experts_ms": experts_s * 1e3}
    if pass_s and experts_s:
        model = model.fitted(experts_s, pass_s)
        source["measured_pass_ms"] = pass_s * 1e3
    return model, source


def _tell(plan: TimedPlan) -> None:
    expected = plan.expectation
    facts = fields(
        gain=expected.gain,
        num_bytes=expected.num_bytes,
        num_rounds=expected.num_rounds,
        num_moves=expected.num_moves,
        balancedness=expected.balancedness_before,
        then=expected.balancedness_after,
        **plan.source,
    )
    if plan.refusal:
        logger.info("experts stay: %s %s", plan.refusal, facts)
    else:
        logger.info("a plan of experts pays by its model %s", facts)
