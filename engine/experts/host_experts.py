"""Copies of experts in a rank's own host memory, that a slot can be filled from without a peer.

Weights do not change while an instance lives, so a copy that was made at the start stays right.
A rank holds whole layers, the first ones, every expert of them: then whatever a plan wants in such
a layer comes over PCIe from its own host, and no rank that serves has to send. All ranks hold the
same layers, so all of them know without asking who sends in a round. Each expert's checksum is
taken when it is stored, and travels in its canary as one from a peer's does.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from engine.experts.expert_tensors import ExpertTensors, content_bytes
from engine.memory.host_memory import free_bytes
from engine.parallel.groups import RankGroup
from runtime.errors import ConfigError, InternalError

GIB: Final = 2**30


class HostExperts:
    """The copies of one rank.

    Attributes:
        num_layers: that are held, from the first MoE layer on.
        nbytes: of them, pinned where a GPU reads them.
    """

    def __init__(self, num_layers: int, num_experts: int, nbytes: int, *, is_pinned: bool) -> None:
        """Allocate.

        Args:
            num_layers: that are held.
            num_experts: logical ones of a layer.
            nbytes: of the content of one expert, scales included.
            is_pinned: for copies to a GPU that nobody waits for.

        Raises:
            InternalError: the driver does not pin as much.
        """
        self.num_layers = num_layers
        # A layer a piece: no host has to find hundreds of gigabytes in one. Registered, because the
        # allocator of pinned tensors takes the next power of two.
        self._layers = [
            torch.zeros(num_experts, nbytes, dtype=torch.uint8) for _ in range(num_layers)
        ]
        self._sums = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.nbytes = sum(layer.nbytes for layer in self._layers)
        self._pinned: list[Tensor] = []
        for layer in self._layers if is_pinned else ():
            _register(layer)
            self._pinned.append(layer)

    def close(self) -> None:
        """Pin nothing any more; behind the last copy."""
        while self._pinned:
            _unregister(self._pinned.pop())

    def has(self, layer: int) -> bool:
        """Whether experts of a layer (from 0) are here."""
        return layer < self.num_layers

    def put(self, layer: int, expert: int, content: Tensor, checksum: Tensor) -> None:
        """Keep an expert's content, [nbytes] uint8 of any device, and its checksum."""
        self._layers[layer][expert].copy_(content)
        self._sums[layer, expert] = checksum

    def get(self, layer: int, expert: int) -> tuple[Tensor, int]:
        """Return an expert's content, on the host, and its checksum."""
        return self._layers[layer][expert], int(self._sums[layer, expert])


def open_host_experts(
    layers: ExpertTensors,
    table: Sequence[Sequence[int]],
    num_experts: int,
    group: RankGroup,
    *,
    gib: float,
    field: str,
) -> HostExperts | None:
    """Hold as many layers as are allowed, and fill them from the ranks; all ranks call.

    Args:
        layers: of this rank.
        table: [L, P], the logical expert of each slot.
        num_experts: logical ones of a layer.
        group: the ranks.
        gib: that each rank may take of its host's memory; 0 for none.
        field: that says so, for errors.

    Raises:
        ConfigError: not one layer fits into that, or a host has less; on all ranks alike.
    """
    if not gib:
        return None
    free = _free_bytes_a_rank(group, layers.device)
    num_layers = layers_within(layers, num_experts, gib=gib, field=field, free_bytes=free)
    host = HostExperts(
        num_layers,
        num_experts,
        content_bytes(layers),
        is_pinned=layers.device.type == "cuda",
    )
    fill(host, layers, table, group)
    return host


def _free_bytes_a_rank(group: RankGroup, device: torch.device) -> int:
    """Return what each rank may take, so that all of them find it on the fullest host."""
    name = zlib.crc32(platform.node().encode())
    own = torch.tensor([[name, free_bytes()]], dtype=torch.int64)
    told = group.all_gather(own.to(device)).tolist()
    names = [each for each, _ in told]
    return int(min(free // names.count(each) for each, free in told))


def layers_within(
    layers: ExpertTensors, num_experts: int, *, gib: float, field: str, free_bytes: int
) -> int:
    """Return how many layers a rank may hold.

    Args:
        layers: of the rank.
        num_experts: logical ones of a layer.
        gib: that the rank may take.
        field: that says so, for errors.
        free_bytes: for each rank.

    Raises:
        ConfigError: not one layer fits into that, or there is less; with what would fit.
    """
    layer_bytes = num_experts * content_bytes(layers)
    wanted = min(layers.num_layers, int(gib * GIB) // layer_bytes)
    fitting = min(layers.num_layers, free_bytes // layer_bytes)
    most = "0, for none"
    if fitting:
        gib_of_most = _gib_of(fitting, layer_bytes)
        most = f"{gib_of_most} or less ({fitting} of {layers.num_layers} layers)"
    if not wanted:
        problem = f"one layer of {num_experts} experts takes {_gib_of(1, layer_bytes)} GiB"
        raise ConfigError(field, gib, problem, f"at least that; {most}")
    if wanted > fitting:
        problem = (
            f"{wanted} layers take {_gib_of(wanted, layer_bytes)} GiB of each rank, and "
            f"{free_bytes / GIB:.3g} GiB a rank are free on its host"
        )
        raise ConfigError(field, gib, problem, most)
    return wanted


def _gib_of(num_layers: int, layer_bytes: int) -> str:
    """Return GiB into which so many layers go and no more, with as few digits as say so."""
    exact = num_layers * layer_bytes / GIB
    for digits in range(1, 12):
        gib = math.ceil(exact * 10**digits) / 10**digits
        if int(gib * GIB) // layer_bytes == num_layers:
            return f"{gib:.{digits}f}"
    raise AssertionError(f"{num_layers} layers of {layer_bytes} bytes")


def fill(
    host: HostExperts,
    layers: ExpertTensors,
    table: Sequence[Sequence[int]],
    group: RankGroup,
) -> None:
    """Bring every expert of the layers to all ranks, as they stand; all call, before steps run.

    Args:
        host: of this rank.
        layers: of this rank.
        table: [L, P], the logical expert of each slot.
        group: the ranks, which hold equal runs of slots.
    """
    share = layers.num_slots
    for layer in range(host.num_layers):
        for slot in range(share):
            content, checksum = layers.packed(layer, slot)
            told = group.all_gather(content[None])
            sums = group.all_gather(checksum[None]).cpu()
            for rank in range(group.size):
                expert = table[layer][rank * share + slot]
                host.put(layer, expert, told[rank], sums[rank])


def _register(memory: Tensor) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        gib = f"{memory.nbytes / GIB:.3g} GiB"
        text = f"the driver pins no {gib} for copies of experts (error {status})"
        raise InternalError(f"{text}. Fix: a smaller rebalance_host_gib, or ulimit -l unlimited")


def _unregister(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
