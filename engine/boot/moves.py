"""The boot of what moves a rank's experts: boxes that are counted before the KV pool, and a way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.boot.experts import moe_layers
from engine.experts.carrier import Carrier
from engine.experts.expert_tensors import ExpertTensors
from engine.experts.host_experts import HostExperts, open_host_experts
from engine.experts.placements import ExpertPlacements
from engine.experts.staging import Staging, box_bytes
from engine.model.spec import ServedModel
from engine.operations import do_nothing
from engine.options import EngineOptions, Switch
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, open_side_group
from engine.parallel.nvlink.expert_carrier import open_nvlink_carrier
from engine.streams import Streams
from runtime.logging import fields, get_logger

SIDE_TIMEOUT_S = 60.0
"""Of a collective beside the steps: planning, or connecting, without a rank that has ended."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMoves:
    """What a rank moves its experts with.

    Attributes:
        placements: of the model; they can change.
        staging: over its weights.
        carrier: between GPUs of one host; None where the ranks need a library for it, which
            whoever booted them brings along.
        host: copies of experts in this rank's host memory, if it may hold some.
        side_group: the ranks, for one thread beside the steps.
        close: gives back what the ranks share; all of them call.
    """

    placements: ExpertPlacements
    staging: Staging
    carrier: Carrier | None
    host: HostExperts | None
    side_group: RankGroup
    close: Callable[[], None]


def can_move(options: EngineOptions, dims: ParallelDims) -> bool:
    """Return whether experts of a rank may move: it shares them, and is told that they may."""
    return options.rebalance_experts is Switch.ON and dims.ep > 1


def open_moves(
    model: ServedModel,
    placements: ExpertPlacements,
    streams: Streams,
    options: EngineOptions | None = None,
) -> OpenMoves | None:
    """Allocate the boxes and open the way between the ranks; all ranks call, before steps run.

    Args:
        model: of this rank.
        placements: of its experts.
        streams: of this rank.
        options: of its engine; None for no copies in host memory.

    Returns:
        None for a model without experts.

    Raises:
        ConfigError: hosts have not the memory for as many copies as are asked for.
    """
    layers = expert_layers(model)
    if layers is None:
        return None
    opened = open_nvlink_carrier(model.groups.ep_group, streams, box_bytes(layers))
    carrier, boxes = (None, None) if opened is None else opened
    staging = Staging(layers, streams, boxes=boxes)
    host = open_host_experts(
        layers,
        placements.table,
        placements.num_logical_experts,
        model.groups.ep_group,
        gib=0.0 if options is None else options.rebalance_host_gib,
        field="rebalance_host_gib" if options is None else options.named("rebalance_host_gib"),
    )
    way, held = "a library" if carrier is None else "NVLink", 0 if host is None else host.nbytes
    facts = fields(by=way, box_bytes=staging.nbytes, host_bytes=held)
    logger.info("experts may move %s", facts)
    return OpenMoves(
        placements=placements,
        staging=staging,
        carrier=carrier,
        host=host,
        side_group=open_side_group(model.groups, timeout_s=SIDE_TIMEOUT_S),
        close=partial(_close, carrier, host),
    )


def _close(carrier: Carrier | None, host: HostExperts | None) -> None:
    if carrier is not None:
        carrier.close()
    if host is not None:
        host.close()


def close_of(moves: OpenMoves | None) -> Callable[[], None]:
    """Return what gives back what was opened, if anything was."""
    return do_nothing if moves is None else moves.close


def expert_layers(model: ServedModel) -> ExpertTensors | None:
    """Return the weights and scales in the slots of all MoE layers, in the model's order."""
    layers = [layer.experts for layer in moe_layers(model).values()]
    if not layers:
        return None
    return ExpertTensors(
        [[*experts.up.parameters(), *experts.down.parameters()] for experts in layers]
    )
