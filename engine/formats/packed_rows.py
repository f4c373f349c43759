"""FP8 rows as bytes, so that numbers and scales travel in one message.

The layout is that of `Fp8Rows.packed`. The key idea: whoever quantises may write straight into a
packed buffer; rows that lie packed already are sent from where they are.
"""

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes


def empty_packed(num_rows: int, num_columns: int, device: torch.device) -> Fp8Rows:
    """Return uninitialised packed rows."""
    shape = (num_rows, packed_row_bytes(num_columns))
    return Fp8Rows.packed(torch.empty(shape, dtype=torch.uint8, device=device), num_columns)


def packed_bytes(rows: Fp8Rows) -> Tensor:
    """Return [T, packed_row_bytes(K)] uint8: the rows' own memory if they are packed, or a copy."""
    num_rows, num_columns = rows.data_TK.shape
    data_TK = rows.data_TK
    if not _are_packed(rows):
        packed = empty_packed(num_rows, num_columns, data_TK.device)
        packed.data_TK.copy_(data_TK)
        packed.scale_TG.copy_(rows.scale_TG)
        data_TK = packed.data_TK
    width = packed_row_bytes(num_columns)
    return data_TK.view(torch.uint8).as_strided((num_rows, width), (width, 1))


def _are_packed(rows: Fp8Rows) -> bool:
    num_columns = rows.data_TK.shape[1]
    width = packed_row_bytes(num_columns)
    return (
        rows.data_TK.stride() == (width, 1)
        and rows.scale_TG.stride() == (width // 4, 1)
        and rows.scale_TG.data_ptr() == rows.data_TK.data_ptr() + num_columns
    )
