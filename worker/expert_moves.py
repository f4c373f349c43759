"""A worker's part in moving experts while steps run: what the engine has not by itself.

Transports between hosts, windows of load, metrics and health. Made where the configuration says so
and the ranks share experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry

from engine.boot.moves import OpenMoves
from engine.experts.counted import CountedExperts
from engine.experts.group_planner import GroupPlanner
from engine.experts.pass_clock import PassClock
from engine.experts.rebalancer import RebalanceOptions, Rebalancer
from engine.experts.side_thread import SideThread
from engine.operations import do_nothing
from kv_transfer.settings import tls_contexts, transport_options
from kv_transfer.transport import Transport, peer_name
from kv_transfer.transports import create_transport
from runtime.metrics.core import counter_of, gauge_of
from worker.arguments import WorkerOptions
from worker.expert_carrier import TransportCarrier
from worker.expert_load import ExpertLoadFeed
from worker.expert_plans import ExpertPlans, open_expert_plans
from worker.health import Health

LAG_STEPS: Final = 8
"""Without it the first plan would come before the first window, and be empty."""
TURN_TIMEOUT_S: Final = 30.0
"""Of one turn: a copy of 44 MB takes a millisecond, a plan less than a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMoves:
    """What moves the experts of a rank, and what has to be closed behind it.

    Attributes:
        rebalancer: for the engine loop.
        side: the thread beside the steps.
        transport: where the ranks need one.
        plans: what makes the group's, on the rank that does.
        follow_load: has the plans told of what experts get.
    """

    rebalancer: Rebalancer
    side: SideThread
    transport: Transport | None
    plans: ExpertPlans | None
    follow_load: Callable[[], None] = do_nothing

    def watch(self, registry: CollectorRegistry, health: Health) -> None:
        """Have load told from now on, export what moves, and say where it will not any more.

        Once there is an engine loop, before it starts.
        """
        self.follow_load()
        rebalancer, counts = self.rebalancer, self.rebalancer.counts
        counter_of(
            registry,
            "pd_expert_rebalance_plans",
            "Plans of a placement of experts",
            lambda: counts.num_plans,
        )
        counter_of(
            registry,
            "pd_expert_rebalance_rounds",
            "Times that all ranks changed their placement",
            lambda: counts.num_rounds,
        )
        counter_of(
            registry,
            "pd_expert_rebalance_moves",
            "Experts of all ranks that changed their slot",
            lambda: counts.num_moves,
        )
        counter_of(
            registry,
            "pd_expert_rebalance_bytes",
            "Weights that this rank took into its slots",
            lambda: counts.num_bytes,
        )
        counter_of(
            registry,
            "pd_expert_rebalance_host_moves",
            "Experts that this rank took from its host's memory",
            lambda: counts.num_host_moves,
        )
        counter_of(
            registry,
            "pd_expert_rebalance_retreats",
            "Turns that all ranks gave up",
            lambda: counts.num_retreats,
        )
        gauge_of(
            registry,
            "pd_expert_rebalance_stopped",
            "1 where experts stay for good, because what was under way could not be fenced off",
            lambda: float(bool(rebalancer.problem)),
        )
        gauge_of(
            registry,
            "pd_expert_placement_epoch",
            "How many changes the placement in force is the result of; alike on all ranks",
            lambda: rebalancer.epoch,
        )
        health.add("experts", lambda: rebalancer.problem)
        if self.plans is not None:
            self.plans.watch(registry)

    def close(self) -> None:
        """End the thread and the process of plans, and let the peers go."""
        self.side.close()
        if self.plans is not None:
            self.plans.close()
        if self.transport is not None:
            self.transport.close()


def open_expert_moves(
    options: WorkerOptions,
    moves: OpenMoves,
    experts: CountedExperts,
    feed: ExpertLoadFeed | None,
    *,
    epoch: int,
) -> ExpertMoves:
    """Begin to rest; all ranks call, before steps run.

    Args:
        options: of a worker.
        moves: what the boot has opened.
        experts: of this rank.
        feed: of their load; None for a rank that another one speaks for.
        epoch: of this life of the instance.

    Raises:
        ConfigError: plans are to be made by time, and nothing is known of how fast this GPU is.
    """
    section = options.section
    group, transport = moves.side_group, None
    clock = PassClock() if feed is None else feed.clock
    plans = open_expert_plans(section, experts, clock, role=options.role)
    side = SideThread("expert-moves")
    carrier = moves.carrier
    if carrier is None:
        transport = _open_transport(options, epoch)
        names = [peer_name(options.instance, epoch, rank) for rank in range(group.size)]
        carrier = TransportCarrier(transport, moves.staging, side, group, names=names)
    is_told, interval = feed is not None, section.rebalance_interval_steps
    planner = GroupPlanner(group, side, moves.placements, plans.make, is_told=is_told)
    follow_load = do_nothing
    if feed is not None:
        follow_load = partial(feed.tell_windows, interval, planner.take_window)
    rebalancer = Rebalancer(
        moves.placements,
        moves.staging,
        carrier,
        planner,
        rank=group.rank,
        num_ranks=group.size,
        host=moves.host,
        options=RebalanceOptions(
            interval_steps=interval,
            lag_steps=min(LAG_STEPS, interval),
            turn_timeout_s=TURN_TIMEOUT_S,
        ),
    )
    return ExpertMoves(
        rebalancer=rebalancer,
        side=side,
        transport=transport,
        plans=plans if group.rank == 0 else None,
        follow_load=follow_load,
    )


def _open_transport(options: WorkerOptions, epoch: int) -> Transport:
    """Return a transport of this purpose alone, at a port of its own."""
    settings = options.config.kv_transfer
    return create_transport(
        settings.transport,
        local_name=peer_name(options.instance, epoch, options.rank),
        host=options.listen.reach,
        options=transport_options(settings, tls_contexts(options.credentials)),
    )
