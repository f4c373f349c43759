"""Rows of no token, whose experts are -1: they land nowhere, and come back as zero.

Steps that are captured have rows for the largest batch that they serve. What such a row holds is
of no step, NaN at worst, and so are its weights. Every layout of experts is tried, on a GPU or in
Triton's interpreter (see `test_fused_gpu`); the exchange over NVLink in `test_kernels_gpu`.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.kernels import reference
from engine.kernels.alignment import Alignment
from engine.kernels.masked_rows import MaskedPlaces
from engine.ops.masked import MOE_ALIGN_MASKED
from tests.engine.triton_device import DEVICE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

NUM_EXPERTS, TOP_K, MAX_ROWS = 8, 3, 128
CASES = [(1, 0), (1, 4), (0, 3), (5, 0), (5, 11), (33, 31)]
"""Tokens, and rows of padding behind them."""


def load(name: str) -> Any:
    return importlib.import_module(f"engine.{name}")


def draw_ids(num_tokens: int, num_padding: int) -> Tensor:
    scores = torch.rand(num_tokens + num_padding, NUM_EXPERTS, device=DEVICE)
    ids = scores.topk(TOP_K, dim=1).indices
    ids[num_tokens:] = -1
    return ids


@pytest.mark.parametrize(("num_tokens", "num_padding"), CASES)
@pytest.mark.parametrize(("first", "num_local"), [(0, NUM_EXPERTS), (2, 3), (7, 1)])
@pytest.mark.parametrize("layout", ["masked", "aligned"])
def test_padding_is_placed_nowhere(
    num_tokens: int, num_padding: int, first: int, num_local: int, layout: str
) -> None:
    ids = draw_ids(num_tokens, num_padding)
    if layout == "masked":
        places, alone = (
            load("ops.masked_kernel").moe_align_masked(given, first, num_local, MAX_ROWS)
            for given in (ids, ids[:num_tokens])
        )
        assert torch.equal(places.num_rows_L, alone.num_rows_L), "no row for padding"
    else:
        places, alone = (
            load("ops.permute_kernel").count_rows(given, first, num_local)
            for given in (ids, ids[:num_tokens])
        )
        assert torch.equal(places.ends_E, alone.ends_E), "no row for padding"
    assert (places.rows_TK[num_tokens:] == -1).all()
    assert torch.equal(places.rows_TK[:num_tokens], alone.rows_TK), "the others stand as without"


def lay_out(layout: str, ids: Tensor, rows: Fp8Rows) -> tuple[Alignment | MaskedPlaces, Tensor]:
    """Return the places, and the numbers there as bytes, [M, D]."""
    if layout == "aligned":
        alignment = load("ops.permute_kernel").moe_align_block_size(ids, 2, 4)
        return alignment, load("ops.permute_kernel").permute_rows(rows, alignment).data_TK.view(
            torch.uint8
        )
    places = load("ops.masked_kernel").moe_align_masked(ids, 2, 4, MAX_ROWS)
    masked = load("ops.masked_kernel").permute_masked_rows(rows, places)
    return places, masked.data_LMD.view(torch.uint8).flatten(0, 1)


@pytest.mark.parametrize(("num_tokens", "num_padding"), CASES)
@pytest.mark.parametrize("layout", ["masked", "aligned"])
@pytest.mark.parametrize(("size", "with_own"), [(128, True), (1408, False)])
def test_padding_lands_nowhere_and_comes_back_as_zero(
    num_tokens: int, num_padding: int, layout: str, with_own: bool, size: int
) -> None:
    num_rows = num_tokens + num_padding
    ids = draw_ids(num_tokens, num_padding)
    room = torch.full((num_rows, packed_row_bytes(size)), 0xFF, dtype=torch.uint8, device=DEVICE)
    rows = Fp8Rows.packed(room, size)  # NaN
    tokens = reference.quantize_rows(torch.randn(num_tokens, size, device=DEVICE))
    rows.data_TK.view(torch.uint8)[:num_tokens] = tokens.data_TK.view(torch.uint8)
    rows.scale_TG[:num_tokens] = tokens.scale_TG
    places, laid_out = lay_out(layout, ids, rows)
    used = places.rows_TK[places.rows_TK >= 0].long()
    is_used = torch.zeros(places.num_rows, dtype=torch.bool, device=DEVICE)
    is_used[used] = True
    assert (laid_out[~is_used] == 0xFF).all(), "rows of no token stay untouched"
    assert (laid_out[is_used] != 0xFF).any(dim=1).all()

    out = torch.randn(places.num_rows, size, device=DEVICE).bfloat16()
    out[~is_used] = torch.nan
    weights = torch.full((num_rows, TOP_K), torch.nan, device=DEVICE)
    weights[:num_tokens] = torch.rand(num_tokens, TOP_K, device=DEVICE)
    own = torch.ones(num_rows, size, device=DEVICE).bfloat16() if with_own else None
    home, expected = (
        module.unpermute_rows(out, places, weights, own)
        for module in (load("ops.permute_kernel"), load("ops.permute"))
    )
    assert (home[num_tokens:] == (1.0 if with_own else 0.0)).all()
    torch.testing.assert_close(home, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("layout", ["masked", "aligned"])
def test_a_step_of_nothing_but_padding(layout: str) -> None:
    ids = draw_ids(0, 6)
    rows = reference.quantize_rows(torch.randn(6, 256, device=DEVICE))
    places, laid_out = lay_out(layout, ids, rows)
    assert (laid_out == 0xFF).all()
    out = torch.full((places.num_rows, 256), torch.nan, device=DEVICE).bfloat16()
    weights = torch.full((6, TOP_K), torch.nan, device=DEVICE)
    assert (load("ops.permute_kernel").unpermute_rows(out, places, weights, None) == 0).all()
    if layout == "masked":
        assert isinstance(places, MaskedPlaces)
        assert places.num_rows_L.tolist() == [0] * 4
        plain = MOE_ALIGN_MASKED.reference(ids, 2, 4, MAX_ROWS)
        assert torch.equal(places.rows_TK, plain.rows_TK)
