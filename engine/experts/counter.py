"""Tokens that have chosen each expert, counted on the device, layer by layer, since the start.

The gates add to it (`engine.ops.gate`), in the kernel that chooses, eager and in captured steps:
logical experts, before any placement turns them into slots. Rows of padding choose nothing, nor do
the dummy steps of idle ranks, nor what fills up the last share where ranks that split heads have
shares of the rows. Drafts that are rejected afterwards were rows all the same, and
count. Nothing is ever set to zero: whoever wants a window takes the difference of two readings, so
that no reader disturbs another, and steps from before the first reading (warm-up, rehearsal,
capture) are in none.

Made and read on the thread that launches steps; a reading is a copy behind the steps so far, that
nobody waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.host_copy import HostCopies
from engine.parallel.groups import RankGroup
from experts.windows import Counts


@dataclass(frozen=True, slots=True)
class Reading:
    """The counts behind some step, perhaps still on their way to the host."""

    _counts: Tensor
    _copies: HostCopies

    @property
    def is_done(self) -> bool:
        """Whether `read` would return at once."""
        return self._copies.is_done

    def read(self) -> Counts:
        """Wait for the step, and return its counts since the start, [L, E]."""
        self._copies.wait()
        return self._counts[:, :-1].numpy()


class ExpertCounter:
    """The counts of one rank: of the tokens that its gates score.

    Attributes:
        layers: L layers with experts, by their number in the model, ascending; those for
            multi-token prediction are behind the others, in rows of their own.
        num_experts: E, logical ones.
        top_k: experts of a token.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        top_k: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        self.num_experts, self.top_k = num_experts, top_k
        # A bin more than there are experts: for what has chosen none.
        shape = (len(self.layers), num_experts + 1)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)

    def bins(self, layer: int) -> Tensor:
        """Return what the gate of a layer adds to, [E + 1] int64; it never moves."""
        return self._counts[self.layers.index(layer)]

    def start_reading(self, group: RankGroup | None = None) -> Reading:
        """Start to copy the counts out, behind all steps that were launched.

        Args:
            group: ranks that count a share each: all call, in the same place among their steps,
                and get the sums; None for the counts of this rank.

        Raises:
            PeerLostError: one of them is gone.
        """
        counts, device = self._counts, self._counts.device
        if group is not None and group.size > 1:
            counts = group.all_reduce(counts.clone())
        elif device.type == "cpu":
            counts = counts.clone()  # they grow in place
        copies = HostCopies(device)
        if device.type != "cpu":
            counts = copies.add(counts)
            copies.close()
        return Reading(counts, copies)
