"""The placements of a rank's MoE layers, each with a map of its own.

Layers route differently, so which expert is popular differs from one to the next; all have equally
many slots, because one dispatcher serves them all. The maps of all layers lie in one tensor: those
of several layers can be written by one copy, between two steps.

Letters: L MoE layers in the order of the model, those for multi-token prediction last; E logical
experts, P physical slots, X most replicas of one expert.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.experts.placement import ExpertPlacement, most_replicas, placement_map
from engine.host_copy import upload
from experts.balance import Table
from runtime.errors import ConfigError


class ExpertPlacements:
    """Where the experts of every layer stand, on the host and on the device.

    Attributes:
        first_layer: number in the model of the first layer with experts.
        num_logical_experts: E.
        maps: [L, E + 1, X + 1] int64, what steps read; see `placement_map`.
    """

    def __init__(
        self,
        table: Sequence[Sequence[int]],
        num_experts: int,
        *,
        first_layer: int = 0,
        device: torch.device | str = "cpu",
        can_change: bool = False,
    ) -> None:
        """Write the maps.

        Args:
            table: [L, P], the logical expert of each slot of each MoE layer.
            num_experts: E.
            first_layer: number in the model of the first of these layers.
            device: of the maps.
            can_change: whether experts may move later; there is then room for every placement.

        Raises:
            ValueError: a slot names an unknown expert, an expert of a layer has no slot, or layers
                have unlike numbers of slots.
        """
        if any(len(above) != len(below) for above, below in pairwise(table)):
            raise ValueError(f"layers have {sorted(set(map(len, table)))} slots, not equally many")
        self.first_layer, self.num_logical_experts = first_layer, num_experts
        width = max((most_replicas(row, num_experts) for row in table), default=1)
        if can_change and table:
            width = max(len(table[0]) - num_experts + 1, 1)
        maps = [placement_map(row, num_experts, width) for row in table]
        empty = torch.empty(0, num_experts + 1, width + 1, dtype=torch.int64)
        self.maps: Tensor = (torch.stack(maps) if maps else empty).to(device)
        self._layers = tuple(
            ExpertPlacement(row, layer_maps, can_change=can_change)
            for row, layer_maps in zip(table, self.maps, strict=True)
        )
        self.num_physical_experts = len(table[0]) if table else num_experts

    @classmethod
    def alike(
        cls,
        physical_to_logical: Sequence[int],
        num_experts: int,
        *,
        layers: range,
        device: torch.device | str = "cpu",
        can_change: bool = False,
    ) -> "ExpertPlacements":
        """Return the same placement for all layers.

        Args:
            physical_to_logical: P entries.
            num_experts: E.
            layers: numbers in the model of the layers with experts.
            device: of the maps.
            can_change: see the constructor.
        """
        return cls(
            [tuple(physical_to_logical)] * len(layers),
            num_experts,
            first_layer=layers.start,
            device=device,
            can_change=can_change,
        )

    @property
    def table(self) -> Table:
        """[L, P], as it is now."""
        return tuple(layer.physical_to_logical_map for layer in self._layers)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self._layers)

    @property
    def width(self) -> int:
        """X, replicas of an expert that maps have room for."""
        return self.maps.shape[2] - 1

    def move(self, changes: Sequence[tuple[int, int, int]]) -> None:
        """Have experts stand in other slots from the next step on; weights are the caller's.

        The rows that differ are written by one copy on the device's current stream: a step that was
        launched before reads the old ones, one that is launched later the new ones.

        Args:
            changes: layer (from 0), slot and the logical expert that stands there from now on.

        Raises:
            ValueError: an expert would have no slot, or more than there is room for; nothing
                changes.
        """
        rows = {
            layer: np.array(self._layers[layer].physical_to_logical_map) for layer, _, _ in changes
        }
        touched: set[tuple[int, int]] = set()
        for layer, slot, expert in changes:
            touched |= {(layer, int(rows[layer][slot])), (layer, expert)}
            rows[layer][slot] = expert
        order = sorted(touched)
        written = np.empty((len(order), self.width + 1), dtype=np.int64)
        for row, (layer, expert) in zip(written, order, strict=True):
            found = np.flatnonzero(rows[layer] == expert)
            if not 0 < len(found) <= self.width:
                problem = f"{len(found)} slots, and maps have room for {self.width}"
                raise ValueError(f"expert {expert} of layer {layer} would have {problem}")
            row[0], row[1:] = len(found), found[0]
            row[1 : 1 + len(found)] = found
        places = [layer * self.maps.shape[1] + expert for layer, expert in order]
        ids, numbers = upload([np.array(places), written], self.maps.device)
        self.maps.flatten(0, 1).index_copy_(0, ids, numbers)
        for layer, moved in rows.items():
            self._layers[layer].moved_to(moved.tolist())

    def of_layer(self, index: int) -> ExpertPlacement:
        """Return the placement of a layer, by its number in the model."""
        return self._layers[index - self.first_layer]


def check_table(
    table: Sequence[Sequence[int]], num_experts: int, *, num_layers: int, num_slots: int, field: str
) -> None:
    """Refuse a table that does not fit a model.

    Args:
        table: [L, P], the logical expert of each slot of each MoE layer.
        num_experts: E.
        num_layers: L that the model has.
        num_slots: P that the configuration asks for.
        field: that names the table.

    Raises:
        ConfigError: names the field, what does not fit and the fix.
    """
    if len(table) != num_layers:
        problem = f"a placement of {len(table)} layers, and the model has {num_layers} with experts"
        raise ConfigError(field, len(table), problem, "record one of this model, drafts included")
    for layer, row in enumerate(table):
        if len(row) != num_slots:
            problem = f"layer {layer} has {len(row)} slots instead of {num_slots}"
            raise ConfigError(field, len(row), problem, "as many redundant experts as it is for")
        try:
            most_replicas(row, num_experts)
        except ValueError as error:
            raise ConfigError(field, layer, str(error), "a slot for every expert") from error
