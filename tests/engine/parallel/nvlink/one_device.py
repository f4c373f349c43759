"""Ranks of an exchange that are windows over plain memory of one device, taking turns.

All ranks send before one receives, so nobody ever waits: on a CPU in Triton's interpreter, or on
one GPU. What that cannot show, waiting for real peers, is in `test_nvlink_gpu`.
"""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.reference import quantize_rows
from engine.parallel.nvlink.shape import LINE, NvlinkShape
from engine.parallel.nvlink.window import Window

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


def begin_afresh() -> None:
    """Skip where kernels cannot run; other inputs in every run."""
    pytest.importorskip("triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.seed()


def kernels(name: str) -> Any:
    """Return a module that needs Triton."""
    return importlib.import_module(f"engine.parallel.nvlink.{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a rank brings: rows, [., K] experts and weights, and what it adds itself."""

    rows: Fp8Rows
    ids: Tensor
    weights: Tensor
    own: Tensor | None = None


class BufferShape(Protocol):
    """Sizes of an exchange, of whatever kind."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def halves(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...


ShapeT = TypeVar("ShapeT", bound=BufferShape)


class Poisoned(Generic[ShapeT]):
    """The windows of all ranks of a shape; buffers are poisoned, but for the counters."""

    def __init__(self, shape: ShapeT, *, records: bool = False) -> None:
        self.shape = shape
        self.buffers = [
            torch.full((shape.buffer_bytes,), 0xFF, dtype=torch.uint8, device=DEVICE)
            for _ in range(shape.num_ranks)
        ]
        for buffer in self.buffers:
            buffer[: shape.halves] = 0
        addresses = [buffer.data_ptr() for buffer in self.buffers]
        self.windows = [
            Window.open(shape, rank, addresses, DEVICE, records=records)
            for rank in range(shape.num_ranks)
        ]


class OneDevice(Poisoned[NvlinkShape]):
    """All ranks of an exchange of tokens."""

    def dispatch(self, tokens: Sequence[Tokens]) -> list[Any]:
        """Send from all ranks, then receive on all, the last first; poison what was read."""
        rows = kernels("rows")
        for window, mine in zip(self.windows, tokens, strict=True):
            rows.send_rows(window, mine.rows, mine.ids, mine.weights)
        received = [rows.receive_rows(window, 1) for window in reversed(self.windows)]
        self._poison()
        return received[::-1]

    def combine(
        self, outs: Sequence[Tensor], received: Sequence[Any], tokens: Sequence[Tokens]
    ) -> list[Tensor]:
        """Send from all ranks, then receive on all; poison what was read."""
        ranks = [kernels("triton_exchange").TritonExchange(window) for window in self.windows]
        for rank, out, got in zip(ranks, outs, received, strict=True):
            rank.send_sums(out, got)
        home = [
            rank.receive_sums(mine.ids, mine.own) for rank, mine in zip(ranks, tokens, strict=True)
        ]
        self._poison()
        return home

    def has_arrived(self, rank: int, units: int) -> bool:
        """Return whether all have sent what the rank would receive now."""
        number = int(self.windows[rank].state[1])
        return self.counters(rank, number) == [(number + 1) // 2 * units] * self.shape.num_ranks

    def counters(self, rank: int, number: int) -> list[int]:
        """Return what the ranks have raised theirs to, of a transfer's parity."""
        lines = self.buffers[rank][: self.shape.halves].view(torch.int32).view(2, LINE // 4)
        counters: list[int] = lines[number % 2, : self.shape.num_ranks].tolist()
        return counters

    def poison(self, rank: int) -> None:
        """Overwrite what the rank has just received; nobody may write there until it sends."""
        shape, number = self.shape, int(self.windows[rank].state[0])
        first = shape.halves + number % 2 * shape.half_bytes
        self.buffers[rank][first : first + shape.half_bytes] = 0xFF

    def _poison(self) -> None:
        for rank in range(self.shape.num_ranks):
            self.poison(rank)


def draw_tokens(
    shape: NvlinkShape, num_tokens: int, *, experts: Sequence[int] = (), share_lost: float = 0.1
) -> Tokens:
    """Draw what a rank brings; sums of it are exact in every order, and in bfloat16.

    Args:
        shape: of the exchange.
        num_tokens: of the rank.
        experts: that are chosen among, all by default.
        share_lost: of pairs that name no expert.
    """
    scores = torch.rand(num_tokens, len(experts) or shape.num_experts, device=DEVICE)
    chosen = scores.topk(shape.top_k, dim=1).indices
    ids = torch.tensor(experts, device=DEVICE)[chosen] if experts else chosen
    lost = torch.rand(num_tokens, shape.top_k, device=DEVICE) < share_lost
    size = (num_tokens, shape.hidden_size)
    rows = quantize_rows(torch.randn(size, device=DEVICE).bfloat16())
    own = torch.randint(-4, 5, size, device=DEVICE).bfloat16()
    return Tokens(
        rows=rows,
        ids=torch.where(lost, -1, ids),
        weights=2.0 ** torch.randint(-1, 2, (num_tokens, shape.top_k), device=DEVICE).float(),
        own=own if torch.rand(()) < 0.7 else None,
    )


def draw_out(shape: NvlinkShape) -> Tensor:
    """Draw experts' output [L, M, D]: small whole numbers."""
    size = (shape.num_local_experts, shape.rows_per_expert, shape.hidden_size)
    return torch.randint(-4, 5, size, device=DEVICE).bfloat16()


def expected_places(shape: NvlinkShape, tokens: Sequence[Tokens], rank: int) -> list[list[int]]:
    """Return the tokens (source * T + token) of each local expert of a rank, in their order."""
    first = rank * shape.num_local_experts
    ids = [mine.ids.tolist() for mine in tokens]
    return [
        [
            source * shape.max_tokens_per_rank + token
            for source, chosen in enumerate(ids)
            for token, experts in enumerate(chosen)
            if expert in experts
        ]
        for expert in range(first, first + shape.num_local_experts)
    ]


def expected_sum(
    shape: NvlinkShape, outs: Sequence[Tensor], tokens: Sequence[Tokens], owner: int
) -> Tensor:
    """Return [., D] bfloat16 for the owner's tokens, from the order of `expected_places`."""
    mine, num_local = tokens[owner], shape.num_local_experts
    places = [expected_places(shape, tokens, rank) for rank in range(shape.num_ranks)]
    total = torch.zeros(mine.rows.data_TK.shape, device=DEVICE)
    if mine.own is not None:
        total += mine.own.float()
    for token, experts in enumerate(mine.ids.tolist()):
        for k, expert in enumerate(experts):
            if expert >= 0:
                rank, local = divmod(expert, num_local)
                slot = owner * shape.max_tokens_per_rank + token
                row = places[rank][local].index(slot)
                total[token] += outs[rank][local, row].float() * mine.weights[token, k]
    return total.bfloat16()
