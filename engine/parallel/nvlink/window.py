"""What the kernels of one rank need to know of an exchange: whose memory, and how far it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine.parallel.nvlink.records import make_ring

WAIT_SECONDS: Final = 120
"""Longer than any rank compiles."""


class Shape(Protocol):
    """The sizes of an exchange, of whatever kind."""

    @property
    def num_ranks(self) -> int:
        """R."""
        ...


ShapeT = TypeVar("ShapeT", bound=Shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Generic[ShapeT]):
    """One rank's view.

    Attributes:
        shape: of the exchange.
        rank: of this process.
        bases: [R] int64 on the device, the address of each rank's buffer as this GPU sees it.
        state: [2] int64 on the device, how many transfers were received and how many were sent.
        wait_seconds: for the peers, before a program gives up.
        ring: where transfers are recorded, see `records`; None if they are not.
    """

    shape: ShapeT
    rank: int
    bases: Tensor
    state: Tensor
    wait_seconds: int = WAIT_SECONDS
    ring: Tensor | None = None

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor]:
        """What a receive takes: bases, state, and the ring or what is not touched in its place."""
        return self.bases, self.state, self.state if self.ring is None else self.ring

    @property
    def waiting(self) -> tuple[int, int]:
        """Its constants: the patience, and the slots of the ring, 0 without one."""
        return self.wait_seconds, 0 if self.ring is None else self.ring.shape[0]

    @classmethod
    def open(
        cls,
        shape: ShapeT,
        rank: int,
        addresses: Sequence[int],
        device: torch.device,
        *,
        wait_seconds: int = WAIT_SECONDS,
        records: bool = False,
    ) -> "Window[ShapeT]":
        """Begin at transfer 1, over buffers whose counters are zero on all ranks."""
        return cls(
            shape=shape,
            rank=rank,
            bases=torch.tensor(addresses, dtype=torch.int64, device=device),
            state=torch.zeros(2, dtype=torch.int64, device=device),
            wait_seconds=wait_seconds,
            ring=make_ring(shape.num_ranks, device) if records else None,
        )
