"""Products of very few rows with a weight, in float32 on a CPU.

A step of decode is bound by reading weights, and BLAS is not: of its two ways to multiply one to
four rows, `x @ w.T` as it stands reads a weight at a third of the memory's speed, and two rows take
half as long again as one. The same numbers as `w @ x.T` come two to three times as fast, and two
columns cost what one does (docs/log/speculation.md has the table). So few rows are multiplied as
columns, and one row as two. A row's result does not depend on which of the two it was, nor on the
other one.

Functions of tensors; whatever they are not better at goes the plain way.

Legend: T rows, N rows and K columns of a weight, B products of a batch.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference

SMALLEST_WEIGHT: Final = 1 << 14
"""Numbers; below that the calls cost more than the reading."""
_MOST_COLUMNS: Final = {1: 1024, 2: 1 << 62, 3: 1 << 62, 4: 512}
"""K up to which so many rows are faster as columns; more rows never are."""


def linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """Return `x` [..., K] times the weight, [..., N]."""
    if x.dim() != 2 or not are_better_as_columns(x, weight_NK):
        return F.linear(x, weight_NK)
    out_NT = torch.mm(weight_NK, as_columns(x))
    return out_NT[:, : x.shape[0]].t().contiguous()


def batched(x_BTK: Tensor, weight_BNK: Tensor, out_BTN: Tensor) -> None:
    """Write each of B products of few rows with a weight of its own, of any strides."""
    if are_better_as_columns(x_BTK, weight_BNK[0]) and weight_BNK.stride(2) == 1:
        num_rows = x_BTK.shape[1]
        if num_rows == 1:
            x_BTK = torch.cat((x_BTK, x_BTK), dim=1)
        out_BNT = torch.bmm(weight_BNK, x_BTK.transpose(1, 2))
        out_BTN.copy_(out_BNT[:, :, :num_rows].transpose(1, 2))
        return
    torch.bmm(x_BTK, weight_BNK.transpose(1, 2), out=out_BTN)


def transposed_if_better(weight_BKN: Tensor) -> Tensor:
    """Return weights of a batch, K numbers apart in memory where `batched` wants its weights so."""
    if weight_BKN.device.type != "cpu" or weight_BKN.dtype != torch.float32:
        return weight_BKN
    return weight_BKN.mT.contiguous().mT


def are_better_as_columns(x: Tensor, weight_NK: Tensor) -> bool:
    """Return whether rows [..., T, K] are multiplied faster as columns."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.shape[-1] <= _MOST_COLUMNS.get(x.shape[-2], 0)
        and weight_NK.numel() >= SMALLEST_WEIGHT
    )


def as_columns(x_TK: Tensor) -> Tensor:
    """Return rows as columns [K, T]; a single one twice."""
    return (torch.cat((x_TK, x_TK)) if x_TK.shape[0] == 1 else x_TK).t()


def grouped_mlp(
    rows_MD: Tensor, num_rows_per_expert: Sequence[int], w13_EGD: Tensor, w2_EDF: Tensor
) -> Tensor:
    """Do what `reference.grouped_mlp` does, where no expert has more than a few rows."""
    num_rows = rows_MD.shape[0]
    most = max(num_rows_per_expert)
    # An expert of one row is given its neighbour's too: two columns come faster than one.
    few = rows_MD[: max(most, 2)]
    if num_rows < 2 or not (
        are_better_as_columns(few, w13_EGD[0])
        and are_better_as_columns(few.new_empty((len(few), w2_EDF.shape[2])), w2_EDF[0])
    ):
        return reference.grouped_mlp(rows_MD, num_rows_per_expert, w13_EGD, w2_EDF)
    runs = list(_runs(num_rows_per_expert, num_rows))
    # All views at once: taken one by one they cost a tenth of the whole.
    w13, w2, rows_DM = w13_EGD.unbind(), w2_EDF.unbind(), rows_MD.t()
    gate_up_GC = torch.cat([w13[run.expert].mm(rows_DM[:, run.rows]) for run in runs], dim=1)
    gate_FC, up_FC = gate_up_GC.chunk(2)
    hidden_FC = F.silu(gate_FC).mul_(up_FC).t().contiguous().t()
    hidden = hidden_FC.split_with_sizes([len(run.columns) for run in runs], dim=1)
    out = [w2[run.expert].mm(own_FC) for run, own_FC in zip(runs, hidden, strict=True)]
    own = [column for run in runs for column in run.own_columns]
    return torch.cat(out, dim=1).t()[own]


class _Run(NamedTuple):
    """What one expert multiplies.

    Attributes:
        expert: its number.
        rows: that it is given; one or two of them.
        columns: where they stand.
        own_columns: those of its own rows.
    """

    expert: int
    rows: slice
    columns: range
    own_columns: range


def _runs(num_rows_per_expert: Sequence[int], num_rows: int) -> Iterator[_Run]:
    row = column = 0
    for expert, count in enumerate(num_rows_per_expert):
        if count:
            width = max(count, 2)
            first = min(row, num_rows - width)
            own = column + row - first
            yield _Run(
                expert=expert,
                rows=slice(first, first + width),
                columns=range(column, column + width),
                own_columns=range(own, own + count),
            )
            row, column = row + count, column + width
