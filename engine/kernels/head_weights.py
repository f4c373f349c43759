"""A weight by heads, as absorbed attention multiplies it: kv_b_proj's half for keys, or for values.

In the compute dtype, or in e4m3 as the checkpoint stores it. A head's half of 128 rows then has one
scale per 128 columns: it is the same block of scales from its first row to its last.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.fp8_rows import GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """H matrices of N rows and C columns.

    Attributes:
        data_HNC: [H, N, C], contiguous along N and C.
        scale_HG: [H, C / 128] float32, of e4m3 data (N is then 128); None in the compute dtype.
    """

    data_HNC: Tensor
    scale_HG: Tensor | None = None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return [H, N, C] in `dtype`: the data itself if it is that."""
        if self.scale_HG is None:
            return self.data_HNC.to(dtype)
        scale_HC = self.scale_HG.repeat_interleave(GROUP, dim=1)
        return (self.data_HNC.float() * scale_HC.unsqueeze(1)).to(dtype)
