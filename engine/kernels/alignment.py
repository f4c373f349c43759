"""Where each (token, expert) pair stands in the contiguous layout of grouped products.

The layout: rows sorted by expert, every expert's run padded to a multiple of 128, unused rows at
the end. Grouped products read one expert per block of 128 rows and skip blocks that name none, but
not for free: whoever can learn the number of rows on the host lays out hardly more than that.
The key idea: the list of fewer rows' experts is the beginning of the list of more, so all is
computed before the number has reached the host, which then only says where to cut. Routing would
make it any number, and libraries compile for numbers they have not seen, so it cuts at steps.
"""

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine.invariants import require

ROW_BLOCK: Final = 128

COARSE_STEP: Final = 1024
"""Rows are laid out in steps of so many below `FINE_FROM`, where each number may want a kernel of
its own: few numbers are few kernels."""

FINE_FROM: Final = 8192
FINE_STEP: Final = 256
"""From there on, where unused rows cost more than kernels, which hardly differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """The places of one dispatch.

    Attributes:
        rows_TK: [T, K] int32, row of each pair; -1 where the expert is on another rank.
        expert_M: [M] int32, expert of each row, equal inside a block of 128; -1 for no expert.
            M is an upper bound, or exact, and a multiple of 128.
    """

    rows_TK: Tensor
    expert_M: Tensor

    @property
    def num_rows(self) -> int:
        """M."""
        return self.expert_M.shape[0]


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
        """[1] int32 on the device: the least M, to be copied to the host."""
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


def stepped_rows(num_rows: int) -> int:
    """Return the least number of rows of `row_steps` that is not below `num_rows`."""
    step = COARSE_STEP if num_rows <= FINE_FROM else FINE_STEP
    return -(-num_rows // step) * step


def row_steps(most: int) -> list[int]:
    """Return the numbers of rows that are laid out, ascending, up to the first from `most` on."""
    most = stepped_rows(most)
    coarse = range(COARSE_STEP, min(most, FINE_FROM) + 1, COARSE_STEP)
    return [*coarse, *range(FINE_FROM + FINE_STEP, most + 1, FINE_STEP)]
