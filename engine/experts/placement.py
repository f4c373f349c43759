"""Which expert stands where: logical experts of the model, physical slots of the ranks.

The gate speaks of logical experts, weights and tokens live in physical slots, and slot p belongs to
rank p // (P / ep). The key idea: redundancy and rebalancing are then data in these maps and no
code. Without redundancy the maps are the identity. A logical expert with several slots spreads its
tokens over them by the token's number in the batch, which is the same on ranks that run the same
tokens.

What the device reads is one tensor whose shape never changes, so a captured step stays valid when
experts move: whoever moves them writes the new numbers into the same memory (see
`engine.experts.placements`).

Letters in shapes: E logical experts, P physical slots, X most replicas of one expert, T tokens,
K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class ExpertPlacement:
    """The maps of one MoE layer."""

    def __init__(
        self, physical_to_logical: Sequence[int], maps: Tensor, *, can_change: bool = False
    ) -> None:
        """Take maps that are written; see `from_physical`.

        Args:
            physical_to_logical: P entries, the logical expert in each slot.
            maps: [E + 1, X + 1] int64, of `placement_map`; kept, and read by every step.
            can_change: whether experts may move: steps then read the maps even where they are the
                identity.
        """
        self._physical_to_logical = tuple(physical_to_logical)
        self._num_slots, self._slots = maps[:, 0], maps[:, 1:]
        self._can_change = can_change
        # Of one that stands still; asked at every step of every layer.
        self._needs_no_maps = self.is_identity and not can_change

    @classmethod
    def identity(cls, num_experts: int, device: torch.device | str = "cpu") -> "ExpertPlacement":
        """Return one slot per expert, in order."""
        return cls.from_physical(range(num_experts), num_experts, device=device)

    @classmethod
    def from_physical(
        cls,
        physical_to_logical: Sequence[int],
        num_experts: int,
        *,
        device: torch.device | str = "cpu",
    ) -> "ExpertPlacement":
        """Derive the maps from the logical expert of each slot; they do not change.

        Raises:
            ValueError: a slot names an unknown expert, or an expert has no slot.
        """
        width = most_replicas(physical_to_logical, num_experts)
        maps = placement_map(physical_to_logical, num_experts, width)
        return cls(physical_to_logical, maps.to(device))

    @property
    def physical_to_logical_map(self) -> tuple[int, ...]:
        """P entries, the logical expert in each slot."""
        return self._physical_to_logical

    @property
    def is_identity(self) -> bool:
        """Whether every logical number is its physical number."""
        return self._physical_to_logical == tuple(range(self.num_logical_experts))

    @property
    def num_logical_experts(self) -> int:
        """E."""
        return self._num_slots.shape[0] - 1

    @property
    def num_physical_experts(self) -> int:
        """P."""
        return len(self._physical_to_logical)

    @property
    def logical_replica_count(self) -> Tensor:
        """[E] int64, how many slots each expert has, at least 1."""
        return self._num_slots[:-1]

    def to_physical(self, topk_ids_TK: Tensor) -> Tensor:
        """Map logical ids [T, K] to physical ids [T, K], spreading tokens over replicas; -1 to -1.

        Without a step of its own for -1: the maps' last row is what it names.
        """
        if self._needs_no_maps:
            return topk_ids_TK
        if self._slots.shape[1] == 1:  # no expert can have two: one kernel instead of four
            return self._slots[topk_ids_TK, 0]
        tokens_T1 = torch.arange(topk_ids_TK.shape[0], device=topk_ids_TK.device).unsqueeze(1)
        replica_TK = tokens_T1 % self._num_slots[topk_ids_TK]
        return self._slots[topk_ids_TK, replica_TK]

    def moved_to(self, physical_to_logical: Sequence[int]) -> None:
        """The device's maps have been written anew, by whoever moved the experts; say so here."""
        assert self._can_change, "steps may have been captured without these maps"
        assert len(physical_to_logical) == self.num_physical_experts
        self._physical_to_logical = tuple(physical_to_logical)


def placement_map(physical_to_logical: Sequence[int], num_experts: int, width: int) -> Tensor:
    """Return what steps read of a layer's placement, on the host.

    Args:
        physical_to_logical: P entries, the logical expert in each slot.
        num_experts: E.
        width: X, replicas that there is room for.

    Returns:
        [E + 1, X + 1] int64: how many slots an expert has, then these, the first one repeated
        behind them. The last row is that of -1, which is no expert, in no slot.

    Raises:
        ValueError: a slot names an unknown expert, an expert has no slot, or more than X.
    """
    slots = _slots_of(physical_to_logical, num_experts)
    crowded = [logical for logical, found in enumerate(slots) if len(found) > width]
    if crowded:
        raise ValueError(f"experts {crowded} have more than {width} slots")
    rows = [[len(found), *found, *found[:1] * (width - len(found))] for found in slots]
    rows.append([1, *[-1] * width])
    return torch.tensor(rows, dtype=torch.int64)


def most_replicas(physical_to_logical: Sequence[int], num_experts: int) -> int:
    """Return X: slots of the expert that has most.

    Raises:
        ValueError: a slot names an unknown expert, or an expert has no slot.
    """
    return max(map(len, _slots_of(physical_to_logical, num_experts)), default=1)


def _slots_of(physical_to_logical: Sequence[int], num_experts: int) -> list[list[int]]:
    slots: list[list[int]] = [[] for _ in range(num_experts)]
    for physical, logical in enumerate(physical_to_logical):
        if not 0 <= logical < num_experts:
            raise ValueError(f"slot {physical} names expert {logical} of {num_experts}")
        slots[logical].append(physical)
    homeless = [logical for logical, found in enumerate(slots) if not found]
    if homeless:
        raise ValueError(f"experts {homeless} have no slot; each needs at least one")
    return slots
