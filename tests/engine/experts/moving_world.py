"""Ranks whose experts move: real maps, weights and boxes, over a wire that a test can break.

Every expert's numbers are a function of layer and expert, so what a slot holds can be read off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.experts.carrier import Carrier
from engine.experts.expert_tensors import ExpertTensors, content_bytes
from engine.experts.host_experts import HostExperts
from engine.experts.placement import placement_map
from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import RebalanceOptions, Rebalancer
from engine.experts.staging import Staging, box_bytes
from engine.experts.votes import Verdict, conclude
from engine.parallel.nvlink.expert_carrier import NvlinkCarrier
from engine.streams import Streams
from experts.moves import Round, order_moves
from runtime.errors import InternalError, TransferFailedError

CPU = torch.device("cpu")


def signature(layer: int, expert: int, width: int) -> Tensor:
    """What an expert's numbers are."""
    return torch.arange(width, dtype=torch.float32) + 1000.0 * expert + 100000.0 * layer + 0.5


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Wire:
    """Between the boxes of all ranks. `fate` of a sending: its delay in steps, or what goes wrong.

    "lost": it never ends; "failed": it says so; "late": it says so, and lands before a fence all
    the same; "torn": half of it lands, and it says that all did.
    """

    fate: Callable[[int, int], int | str] = lambda source, reader: 0
    inboxes: dict[int, Tensor] = field(default_factory=dict)
    late: list[Callable[[], object]] = field(default_factory=list)

    def land_late(self) -> None:
        for land in self.late:
            land()
        self.late.clear()


class WireCarrier:
    """See `Carrier`."""

    def __init__(self, wire: Wire, rank: int, staging: Staging) -> None:
        self._wire, self._rank, self._staging = wire, rank, staging
        wire.inboxes[rank] = staging.inbox
        self._left: int | str = 0
        self._land: Callable[[], object] | None = None
        self.closed = self.recovered = 0
        self.recovery_fails = False

    @property
    def is_ready(self) -> bool:
        if self.recovery_fails and self.recovered:
            raise TransferFailedError("no way back")
        return True

    def box(self, rank: int) -> Tensor:
        return self._staging.outbox

    def send(self, rank: int, start: int, end: int) -> None:
        assert self._land is None, "the sending before is not over"
        self._left = self._wire.fate(self._rank, rank)
        half = start + (end - start) // 2
        upto = half if self._left == "torn" else end
        place = self._wire.inboxes[rank][start:upto]
        self._land = partial(place.copy_, self._staging.outbox[start:upto].clone())

    def is_sent(self) -> bool:
        if self._land is None:
            return True
        match self._left:
            case "lost":
                return False
            case "late":
                self._wire.late.append(self._land)
                raise TransferFailedError("it was refused")
            case "failed":
                raise TransferFailedError("it was refused")
            case int(steps) if steps > 0:
                self._left = steps - 1
                return False
        self._land()
        self._land = None
        return True

    def recover(self) -> None:
        self.recovered += 1
        self._land = None
        self._wire.land_late()  # a fence: what was under way is over behind it

    def close(self) -> None:
        self.closed += 1


@dataclass
class TablePlanner:
    """Plans the way to the next of some tables; the same on all ranks."""

    placements: ExpertPlacements
    num_ranks: int
    targets: Callable[[int], np.ndarray | None]
    num_taken: int = 0
    delay: int = 0
    error: str = ""
    closed: int = 0
    _left: int = -1

    def start(self) -> None:
        self._left = self.delay

    def is_done(self) -> bool:
        if self.error:
            raise InternalError(self.error)
        self._left -= self._left > 0
        return self._left == 0

    def take(self) -> Sequence[Round]:
        target = self.targets(self.num_taken)
        self.num_taken += 1
        if target is None:
            return ()
        current = np.array(self.placements.table, dtype=np.int64)
        return order_moves(current, target, num_ranks=self.num_ranks)[1]

    @property
    def is_idle(self) -> bool:
        return True

    def recover(self) -> None:
        self._left = -1

    def close(self) -> None:
        self.closed += 1


def random_tables(
    seed: int, *, num_layers: int, num_experts: int, num_slots: int
) -> Callable[[int], np.ndarray]:
    """Placements drawn anew each time, in all of which every expert has a slot."""

    def draw(index: int) -> np.ndarray:
        rng = random.Random(seed * 1000 + index)
        rows = []
        for _ in range(num_layers):
            extra = [rng.randrange(num_experts) for _ in range(num_slots - num_experts)]
            row = [*range(num_experts), *extra]
            rng.shuffle(row)
            rows.append(row)
        return np.array(rows, dtype=np.int64)

    return draw


class MovingRank:
    """One rank: its slots, and what moves them."""

    def __init__(self, world: MovingWorld, rank: int) -> None:
        self.world, self.rank = world, rank
        table = [[slot % world.num_experts for slot in range(world.num_slots)]] * world.num_layers
        self.placements = ExpertPlacements(table, world.num_experts, can_change=True)
        share = world.num_slots // world.num_ranks
        self.layers = [
            [
                torch.stack(
                    [signature(layer, row[rank * share + slot], width) for slot in range(share)]
                )
                for width in (world.width, 3)  # numbers, and fewer scales
            ]
            for layer, row in enumerate(table)
        ]
        self.tensors = ExpertTensors(self.layers)
        inbox = world.inboxes[rank] if world.inboxes else None
        self.staging = Staging(
            self.tensors, Streams(CPU), inbox=inbox, piece_bytes=world.piece_bytes
        )
        self.host = world.host_of(self)
        self.wire = WireCarrier(world.wire, rank, self.staging)
        mapped = NvlinkCarrier(world.inboxes, self.wire.close)
        self.carrier: Carrier = mapped if world.inboxes else self.wire
        self.planner = TablePlanner(self.placements, world.num_ranks, world.targets)
        self.rebalancer = Rebalancer(
            self.placements,
            self.staging,
            self.carrier,
            self.planner,
            rank=rank,
            num_ranks=world.num_ranks,
            options=RebalanceOptions(interval_steps=world.interval, turn_timeout_s=world.timeout_s),
            host=self.host,
            clock=world.clock,
        )

    def check(self) -> None:
        """Weights, scales, host's table and device's maps are of one placement."""
        share = self.world.num_slots // self.world.num_ranks
        for layer, row in enumerate(self.placements.table):
            for part in self.layers[layer]:
                for slot in range(share):
                    expert = row[self.rank * share + slot]
                    assert part[slot].equal(signature(layer, expert, part.shape[1]))
            width = self.placements.width
            expected = placement_map(row, self.world.num_experts, width)
            assert self.placements.maps[layer].equal(expected)


@dataclass
class MovingWorld:
    """All ranks in one thread, a step at a time."""

    num_ranks: int
    num_experts: int
    num_slots: int
    num_layers: int = 2
    width: int = 5
    interval: int = 3
    timeout_s: float = 5.0
    piece_bytes: int = 256
    is_mapped: bool = False
    seed: int = 0
    host_layers: int = 0
    targets: Callable[[int], np.ndarray | None] | None = None
    wire: Wire = field(default_factory=Wire)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        if self.targets is None:
            self.targets = random_tables(
                self.seed,
                num_layers=self.num_layers,
                num_experts=self.num_experts,
                num_slots=self.num_slots,
            )
        self.inboxes: list[Tensor] = []
        if self.is_mapped:  # as with GPUs of one host: the peers' inboxes are packed into
            row = torch.zeros(1, self.width), torch.zeros(1, 3)
            nbytes = box_bytes(ExpertTensors([row]))
            self.inboxes = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.num_ranks)]
        self.ranks = [MovingRank(self, rank) for rank in range(self.num_ranks)]

    def host_of(self, rank: MovingRank) -> HostExperts | None:
        """What a rank holds in host memory: every expert of the first layers."""
        if not self.host_layers:
            return None
        tensors = rank.tensors
        host = HostExperts(
            self.host_layers, self.num_experts, content_bytes(tensors), is_pinned=False
        )
        for layer in range(self.host_layers):
            for expert in range(self.num_experts):
                parts = [signature(layer, expert, width)[None] for width in (self.width, 3)]
                host.put(layer, expert, *ExpertTensors([parts]).packed(0, 0))
        return host

    def step(self, *, has_work: bool = True) -> Verdict:
        """One meeting of all ranks, and what a step would run on."""
        self.clock.now += 0.01
        words = [rank.rebalancer.say() for rank in self.ranks]
        verdict = conclude(words)
        tables = {rank.placements.table for rank in self.ranks}
        assert len(tables) == 1, "a step would run on unlike placements"
        for rank in self.ranks:
            rank.rebalancer.hear(verdict, has_work=has_work)
        return verdict

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()
