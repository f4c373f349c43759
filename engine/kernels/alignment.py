"""Where each (token, expert) pair stands in the contiguous layout of grouped GEMMs.

The layout: rows sorted by expert, every expert's run padded to a multiple of 128, unused rows at
the end. A grouped GEMM reads one expert per block of 128 rows. How many rows are in use is known on
the device alone, and the host does not wait for it: it lays out as many as any routing could need.
That would be slow, because DeepGEMM loads blocks of no expert like others, and one of R ranks uses
about 1 / R of them. So the host cuts the layout at a *capacity*, a little more than even routing
needs. Rows before it go through the fast grouped GEMM; the *overflow* behind it, mostly nothing, is
left to a kernel that reads on the device how many rows there are. No row is ever dropped.

Where the host learns the number of rows all the same, the layout ends there, without overflow.
"""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require

ROW_BLOCK: Final = 128

COARSE_STEP: Final = 1024
"""Rows are laid out in steps of so many below `FINE_FROM`, where each number may want a kernel of
its own: few numbers are few kernels."""

FINE_FROM: Final = 8192
FINE_STEP: Final = 256
"""From there on, where unused rows cost more than kernels, which hardly differ."""

_SLACK: Final = 16
"""One of several ranks has capacity for one in so many rows more than its even share."""

_PADDING: Final = 80
"""Rows that an expert has capacity for beyond its pairs: padding to 128 takes 64 in the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowPlaces:
    """The rows behind the capacity.

    Attributes:
        capacity: rows before them, a multiple of 128.
        ends_E: [E] int32, where each expert's run ends; the last is the number of rows in use,
            those before the capacity included.
        token_V: [V] int32, token of each row; anything where no token stands.
    """

    capacity: int
    ends_E: Tensor
    token_V: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The places of one dispatch.

    Attributes:
        rows_TK: [T, K] int32, row of each pair; -1 where the expert is on another rank.
        expert_M: [M] int32, expert of each row, equal inside a block of 128; -1 for no expert.
            M is an upper bound, or exact, and a multiple of 128.
        overflow: the last rows of these M, if the layout has a capacity.
    """

    rows_TK: Tensor
    expert_M: Tensor
    overflow: OverflowPlaces | None = None

    @property
    def num_rows(self) -> int:
        """M."""
        return self.expert_M.shape[0]

    @property
    def capacity(self) -> int:
        """Rows that the fast GEMM runs over."""
        return self.expert_M.shape[0] if self.overflow is None else self.overflow.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """What the experts are given of the rows behind the capacity: nothing is copied for them.

    Attributes:
        source: [T, D], the tokens' own rows.
        places: which of them stand where.
    """

    source: Fp8Rows
    places: OverflowPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The places of one dispatch, before the number of rows is known on the host.

    Attributes:
        rows_TK: [T, K] int32, as in `Alignment`.
        ends_E: [E] int32, where each expert's padded run ends; a running sum.
        expert_M: [M] int32, as in `Alignment`; M is what any routing could need.
    """

    rows_TK: Tensor
    ends_E: Tensor
    expert_M: Tensor

    @property
    def num_rows(self) -> Tensor:
        """[1] int32 on the device: the least M."""
        return self.ends_E[-1:]

    def rows_to_lay_out(self, num_rows: int) -> int:
        """Return M for `num_rows`, which has reached the host: the next step, if there is room."""
        return min(stepped_rows(num_rows), self.expert_M.shape[0])

    def lay_out(self, num_rows: int) -> Alignment:
        """Return the places among `num_rows` rows, a multiple of 128 and at least `self.num_rows`.

        Raises:
            InternalError: no such number, or more than any routing needs.
        """
        most = self.expert_M.shape[0]
        require(
            num_rows % ROW_BLOCK == 0 and num_rows <= most,
            "rows to lay out",
            num_rows,
            f"a multiple of {ROW_BLOCK} up to {most} is wanted",
        )
        return Alignment(rows_TK=self.rows_TK, expert_M=self.expert_M[:num_rows])


def max_aligned_rows(num_pairs: int, num_experts: int) -> int:
    """Return M: the most rows that any routing of `num_pairs` needs."""
    # Each expert with rows wastes at most 127, and at most `num_pairs` experts have rows.
    wasted = min(num_experts, num_pairs) * (ROW_BLOCK - 1)
    return -(-(num_pairs + wasted) // ROW_BLOCK) * ROW_BLOCK


def row_capacity(num_pairs: int, num_experts: int, num_ranks: int) -> int:
    """Return the rows that the fast grouped GEMM runs over, whatever the routing is.

    One of `row_steps`; perhaps more than `max_aligned_rows`, and then nothing overflows.

    Args:
        num_pairs: (token, expert) pairs that are placed, those of other ranks' experts included.
        num_experts: of this rank.
        num_ranks: that share the experts.
    """
    most = max_aligned_rows(num_pairs, num_experts)
    own_pairs = -(-num_pairs // num_ranks)
    if num_ranks > 1:
        own_pairs += own_pairs // _SLACK
    per_expert = max(-(-own_pairs // num_experts) + _PADDING, ROW_BLOCK)
    capacity = stepped_rows(min(num_experts, num_pairs) * per_expert)
    # A few unused rows cost less than two more kernels.
    return capacity if most - capacity > COARSE_STEP else stepped_rows(most)


def stepped_rows(num_rows: int) -> int:
    """Return the least number of rows of `row_steps` that is not below `num_rows`."""
    step = COARSE_STEP if num_rows <= FINE_FROM else FINE_STEP
    return -(-num_rows // step) * step


def row_steps(most: int) -> list[int]:
    """Return the numbers of rows that are laid out, ascending, up to the first from `most` on."""
    most = stepped_rows(most)
    coarse = range(COARSE_STEP, min(most, FINE_FROM) + 1, COARSE_STEP)
    return [*coarse, *range(FINE_FROM + FINE_STEP, most + 1, FINE_STEP)]
