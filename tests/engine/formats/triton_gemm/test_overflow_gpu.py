"""Experts over the rows behind the capacity, against the reference: poisoned outputs, any routing.

Ampere's form is run everywhere, by passing its limits. They also run on a CPU in Triton's
interpreter: TRITON_INTERPRET=1 pytest -m gpu, on small shapes (with a NumPy before 2.4).
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.formats.triton_gemm.limits import AMPERE, HOPPER, DeviceLimits
from engine.kernels import expert_reference, reference
from engine.kernels.alignment import ROW_BLOCK, Alignment, Overflow
from engine.ops.permute import MOE_ALIGN_BLOCK_SIZE, PERMUTE_ROWS
from engine.weights.fp8 import quantize_block
from tests.engine.relative_error import relative_error
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("default"),
]

NUM_EXPERTS, FIRST, NUM_LOCAL, TOP_K = 8, 2, 4, 3
HIDDEN, WIDTH = (256, 128) if IS_INTERPRETED else (1024, 512)
NUM_TOKENS = 110 if IS_INTERPRETED else 900
SAME_INPUTS = 0.12 if IS_INTERPRETED else 2e-2
"""Relative error: activations are rounded to e4m3 twice from slightly different sums (the
interpreter cuts where a GPU rounds)."""

LIMITS = pytest.mark.parametrize("limits", [AMPERE, HOPPER], ids=["ampere", "hopper"])


def overflow_experts(limits: DeviceLimits) -> Any:
    module = importlib.import_module("engine.formats.triton_gemm.overflow")
    if not IS_INTERPRETED and not DeviceLimits.of(DEVICE).has_fp8 and limits.has_fp8:
        pytest.skip("this GPU has no FP8")
    return module.OverflowExperts(limits)


def draw_experts() -> list[tuple[Tensor, Tensor]]:
    """Return w13 and w2, each as (e4m3, scales)."""
    stacks = []
    for rows, columns in (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH):
        pairs = [
            quantize_block(torch.randn(rows, columns, device=DEVICE) / columns**0.5)
            for _ in range(NUM_LOCAL)
        ]
        stacks.append((torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs])))
    return stacks


def draw_rows(num_tokens: int, *, is_packed: bool) -> Fp8Rows:
    out = None
    if is_packed:
        size = (num_tokens, packed_row_bytes(HIDDEN))
        out = Fp8Rows.packed(torch.zeros(size, dtype=torch.uint8, device=DEVICE), HIDDEN)
    return reference.quantize_rows(torch.randn(num_tokens, HIDDEN, device=DEVICE).bfloat16(), out)


def draw_routing(num_tokens: int, *, is_skewed: bool) -> Tensor:
    """Return distinct experts of each token; of skewed ones most choose the first ones we hold."""
    scores = torch.rand(num_tokens, NUM_EXPERTS, device=DEVICE)
    if is_skewed:
        scores[:, FIRST : FIRST + 2] += 1.0
    return scores.topk(TOP_K, dim=1).indices


def places_behind(alignment: Alignment) -> Tensor:
    """Return the rows behind the capacity that a token stands in, counted from it."""
    rows = alignment.rows_TK.flatten().long()
    return rows[rows >= alignment.capacity] - alignment.capacity


@LIMITS
@pytest.mark.parametrize(("is_packed", "is_skewed"), [(False, True), (True, False)])
@pytest.mark.parametrize("capacity", [0, 2 * ROW_BLOCK])
def test_rows_behind_the_capacity_are_computed(
    limits: DeviceLimits, is_packed: bool, is_skewed: bool, capacity: int
) -> None:
    rows = draw_rows(NUM_TOKENS, is_packed=is_packed)
    ids = draw_routing(NUM_TOKENS, is_skewed=is_skewed)
    alignment = MOE_ALIGN_BLOCK_SIZE.reference(ids, FIRST, NUM_LOCAL, capacity)
    places = alignment.overflow
    assert places is not None
    w13, w2 = draw_experts()
    out = torch.empty((len(places.token_V), HIDDEN), dtype=torch.bfloat16, device=DEVICE)
    overflow, expert_V = Overflow(source=rows, places=places), alignment.expert_M[capacity:]
    overflow_experts(limits).run(overflow, expert_V, w13, w2, out)
    before = PERMUTE_ROWS.reference(rows, alignment)
    expected = expert_reference.grouped_fp8_mlp(before, alignment.expert_M, w13, w2, overflow)
    used = places_behind(alignment)
    assert len(used) > 0
    assert relative_error(out[used], expected[capacity:][used]) < SAME_INPUTS
    end = int(places.ends_E[-1]) - capacity
    assert out[end:].isnan().all(), "rows not in use are left as they are"


@LIMITS
def test_nothing_behind_the_capacity_is_nothing_to_do(limits: DeviceLimits) -> None:
    rows = draw_rows(NUM_TOKENS, is_packed=True)
    ids = torch.full((NUM_TOKENS, 1), FIRST, device=DEVICE)
    most = MOE_ALIGN_BLOCK_SIZE.reference(ids, FIRST, NUM_LOCAL).expert_M
    for capacity in range(len(most) - ROW_BLOCK, 0, -ROW_BLOCK):
        alignment = MOE_ALIGN_BLOCK_SIZE.reference(ids, FIRST, NUM_LOCAL, capacity)
        places = alignment.overflow
        assert places is not None
        if int(places.ends_E[-1]) > capacity:
            break
        out = torch.empty((len(places.token_V), HIDDEN), dtype=torch.bfloat16, device=DEVICE)
        overflow = Overflow(source=rows, places=places)
        overflow_experts(limits).run(overflow, alignment.expert_M[capacity:], *draw_experts(), out)
        assert out.isnan().all()


@LIMITS
def test_not_a_number_stays_with_its_token(limits: DeviceLimits) -> None:
    """A token whose row is NaN spoils no other one's, in blocks that they share."""
    rows = draw_rows(NUM_TOKENS, is_packed=False)
    rows.scale_TG[7] = float("nan")
    ids = draw_routing(NUM_TOKENS, is_skewed=True)
    alignment = MOE_ALIGN_BLOCK_SIZE.reference(ids, FIRST, NUM_LOCAL, 0)
    assert alignment.overflow is not None
    out = torch.zeros((len(alignment.expert_M), HIDDEN), dtype=torch.bfloat16, device=DEVICE)
    overflow = Overflow(source=rows, places=alignment.overflow)
    overflow_experts(limits).run(overflow, alignment.expert_M, *draw_experts(), out)
    places = alignment.rows_TK.long()
    others = torch.cat((places[:7], places[8:])).flatten()
    assert not out[others[others >= 0]].isnan().any()
    mine = places[7][places[7] >= 0]
    assert len(mine) > 0
    assert out[mine].isnan().all()
