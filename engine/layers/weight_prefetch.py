"""When a layer asks for weights that it, or the next one, will read soon.

The plan is data: for each point of a layer the pieces of memory, made once, when weights have their
place. A layer names the point that it is at, and knows no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.kernels.ahead import AheadKernels, NothingAhead
from engine.kernels.weight_chunks import WeightChunks

MAX_ROWS = 512
"""Of a step that waits for weights; with more it computes, and brings them in meanwhile."""


class PrefetchPoint(Enum):
    """Moments from which the memory of the GPU has little to do."""

    ATTENTION = auto()
    """Attention computes; it reads less than could be read."""
    DISPATCH = auto()
    """Tokens travel to their experts."""
    COMBINE = auto()
    """Tokens travel back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPrefetch:
    """The plan of one layer; by default nothing."""

    kernels: AheadKernels = field(default_factory=NothingAhead)
    chunks: Mapping[PrefetchPoint, WeightChunks] = field(default_factory=dict)

    def bring(self, point: PrefetchPoint, num_rows: int) -> None:
        """Ask for what is planned at this point of a step of so many rows."""
        chunks = self.chunks.get(point)
        if chunks is not None and num_rows <= MAX_ROWS:
            self.kernels.prefetch(chunks)
