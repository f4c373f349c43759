"""Short steps on one GPU: masked rows give what rows in tiles of 128 give."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.short_experts import draw_stack, make_dispatchers
from engine.formats import deep_gemm
from engine.formats.base import run_experts
from engine.formats.expert_rows import AlignedRows
from engine.kernels.create import create_kernels
from engine.kernels.masked_rows import MaskedRows
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
NUM_EXPERTS, HIDDEN, WIDTH = 64, 1024, 256
MOST_ERROR = 4e-2
"""Relative: streamed experts do not round to bfloat16 between the products."""


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 128])
def test_masked_rows_give_the_sums_of_tiles_of_128(num_tokens: int) -> None:
    if not torch.cuda.is_available() or not deep_gemm.is_available():
        pytest.skip("needs a Hopper GPU with DeepGEMM")
    kernels = create_kernels("cuda")
    number_format = fp8_of(kernels)
    torch.manual_seed(num_tokens)
    w13 = draw_stack(NUM_EXPERTS, 2 * WIDTH, HIDDEN)
    w2 = draw_stack(NUM_EXPERTS, HIDDEN, WIDTH)
    rows = quantize(kernels, torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16())
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, device="cuda").topk(8, dim=-1)
    ids[0, :4] = -1
    sums = []
    for dispatcher, kind in zip(
        make_dispatchers(kernels, NUM_EXPERTS), (AlignedRows, MaskedRows), strict=True
    ):
        received, plan = dispatcher.start_dispatch(rows, ids, weights).wait()
        assert isinstance(received, kind)
        out = run_experts(number_format, received, w13, w2)
        sums.append(dispatcher.start_combine(out, plan, None).wait())
    assert relative_error(sums[1], sums[0]) < MOST_ERROR
