"""The boot of what moves a rank's experts: boxes that are counted before the KV pool, and a way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.boot.experts import moe_layers
from engine.experts.carrier import Carrier
from engine.experts.expert_tensors import ExpertTensors
from engine.experts.host_experts import HostExperts, open_host_experts
from engine.experts.placements import ExpertPlacements
from engine.experts.staging import PIECE_BYTES, Canary, Staging, box_bytes
from engine.model.spec import ServedModel
from engine.operations import do_nothing
from engine.options import EngineOptions, Switch
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, open_side_group
from engine.parallel.nvlink.expert_carrier import open_nvlink_carrier
from engine.streams import Streams
from runtime.errors import InternalError
from runtime.logging import fields, get_logger

_POLL_S = 0.001
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
    *,
    piece_bytes: int = PIECE_BYTES,
) -> OpenMoves | None:
    """Allocate the boxes and open the way between the ranks; all ranks call, before steps run.

    Args:
        model: of this rank.
        placements: of its experts.
        streams: of this rank.
        options: of its engine; None for no copies in host memory.
        piece_bytes: of an expert that move beside one step, at most.

    Returns:
        None for a model without experts.

    Raises:
        ConfigError: hosts have not the memory for as many copies as are asked for.
        InternalError: the way between the ranks does not bring an expert as it is.
    """
    layers = expert_layers(model)
    if layers is None:
        return None
    group = model.groups.ep_group
    opened = open_nvlink_carrier(group, streams.device, box_bytes(layers))
    carrier, inbox = (None, None) if opened is None else opened
    staging = Staging(layers, streams, inbox=inbox, piece_bytes=piece_bytes)
    _try_out(staging, placements, group, carrier)
    host = open_host_experts(
        layers,
        placements.table,
        placements.num_logical_experts,
        group,
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


def _try_out(
    staging: Staging, placements: ExpertPlacements, group: RankGroup, carrier: Carrier | None
) -> None:
    """Use everything once, because a device takes milliseconds to load what it uses first.

    Every rank has its first expert come to the next rank, where there is a way, and stay where it
    is.

    Raises:
        InternalError: what came is not what went.
    """
    canary = Canary(turn=0, layer=0, slot=0, expert=0)
    box = staging.inbox if carrier is None else carrier.box((group.rank + 1) % group.size)
    group.barrier()  # nobody packs into an inbox that is not there yet
    for piece in range(staging.num_pieces):
        staging.pack(piece, canary, 0, box)
    _settle(staging)
    group.barrier()
    for piece in range(staging.num_pieces):
        staging.check(piece, canary)
    _settle(staging)
    if not staging.fits():
        raise InternalError(f"the first expert that came to rank {group.rank} is not what was sent")
    placements.move([(0, 0, placements.table[0][0])])
    group.barrier()


def _settle(staging: Staging) -> None:
    while not (staging.is_packed() and staging.is_checked()):
        time.sleep(_POLL_S)


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
