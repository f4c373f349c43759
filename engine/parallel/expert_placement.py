"""Which expert stands where: logical experts of the model, physical slots of the ranks.

The gate speaks of logical experts, weights and tokens live in physical slots, and slot p belongs to
rank p // (P / ep). The key idea: redundancy and rebalancing are then data in these maps and no
code. Without redundancy the maps are the identity. A logical expert with several slots spreads its
tokens over them by the token's number in the batch, which is the same on ranks that run the same
tokens.

Letters in shapes: E logical experts, P physical slots, X most replicas of one expert, T tokens,
K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The maps of one MoE layer.

    Attributes:
        physical_to_logical_map: P entries, the logical expert in each slot.
        is_identity: whether every logical number is its physical number.
    """

    physical_to_logical_map: tuple[int, ...]
    is_identity: bool
    # With a row more than there are experts: that of -1, which is no expert, in no slot.
    _slots: Tensor
    _num_slots: Tensor

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
        """Derive the maps from the logical expert of each slot.

        Raises:
            ValueError: a slot names an unknown expert, or an expert has no slot.
        """
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for physical, logical in enumerate(physical_to_logical):
            if not 0 <= logical < num_experts:
                raise ValueError(f"slot {physical} names expert {logical} of {num_experts}")
            slots[logical].append(physical)
        homeless = [logical for logical, found in enumerate(slots) if not found]
        if homeless:
            raise ValueError(f"experts {homeless} have no slot; each needs at least one")
        width = max(map(len, slots), default=1)
        slots.append([-1])
        padded = [found + found[:1] * (width - len(found)) for found in slots]
        return cls(
            physical_to_logical_map=tuple(physical_to_logical),
            is_identity=tuple(physical_to_logical) == tuple(range(num_experts)),
            _slots=torch.tensor(padded, dtype=torch.int64, device=device),
            _num_slots=torch.tensor(list(map(len, slots)), dtype=torch.int64, device=device),
        )

    @property
    def logical_replica_count(self) -> Tensor:
        """[E] int64, how many slots each expert has, at least 1."""
        return self._num_slots[:-1]

    @property
    def num_physical_experts(self) -> int:
        """P."""
        return len(self.physical_to_logical_map)

    def to_physical(self, topk_ids_TK: Tensor) -> Tensor:
        """Map logical ids [T, K] to physical ids [T, K], spreading tokens over replicas; -1 to -1.

        Without a step of its own for -1: the maps' last row is what it names.
        """
        if self.is_identity:
            return topk_ids_TK
        tokens_T1 = torch.arange(topk_ids_TK.shape[0], device=topk_ids_TK.device).unsqueeze(1)
        replica_TK = tokens_T1 % self._num_slots[topk_ids_TK]
        return self._slots[topk_ids_TK, replica_TK]
