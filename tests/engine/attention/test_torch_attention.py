"""Attention by PyTorch against the reference; the one-call way is in test_triton_gpu.py."""

import pytest
import torch

from engine.attention.kernels import VarlenLengths
from engine.attention.torch_attention import TorchAttention
from engine.kernels import reference


@pytest.mark.parametrize(
    "lengths", [[(1, 1)], [(7, 7)], [(1, 30)], [(5, 5), (1, 30), (7, 19), (12, 12)]]
)
@pytest.mark.parametrize(("key_width", "value_width"), [(192, 128), (24, 40)])
def test_sequences_attend_as_in_the_reference(
    lengths: list[tuple[int, int]], key_width: int, value_width: int
) -> None:
    num_queries, num_positions = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k = torch.randn(num_queries, 3, key_width), torch.randn(num_positions, 3, key_width)
    v = torch.randn(num_positions, 3, 2 * value_width)[..., value_width:]  # a strided view
    ends = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seqs = VarlenLengths(lengths=lengths, cu_seqlens_q=ends[:, 0], cu_seqlens_k=ends[:, 1])
    actual = TorchAttention().varlen_attention(q, k, v, seqs, 0.1)
    expected = reference.varlen_attention(q, k, v, lengths, 0.1)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
