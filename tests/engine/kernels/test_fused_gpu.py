"""Our Triton kernels against their references: fresh inputs, poisoned outputs, stated tolerances.

They also run on a CPU in Triton's interpreter, on small shapes: `make kernels-check`, or
TRITON_INTERPRET=1 pytest -m gpu. (Before Triton 3.8 that wants a NumPy before 2.4.)
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.kernels import reference
from engine.kernels.alignment import Alignment
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.rotation import Rotation
from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.latents import JOIN_KEYS, ROTATE_QUERIES
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.norm import RMS_NORM
from engine.ops.permute import COUNT_ROWS, MOE_ALIGN_BLOCK_SIZE, UNPERMUTE_ROWS
from engine.ops.routing_rule import RoutingRule
from tests.engine.triton_device import DEVICE, IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    # Of the interpreter, where a loop's bounds come from memory.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

TOKENS = [1, 5, 70] if IS_INTERPRETED else [1, 5, 70, 129, 4099]
HIDDEN = 384 if IS_INTERPRETED else 7168
BF16 = 2e-2
"""One unit in the last of 8 bits is 0.8 %; the interpreter cuts instead of rounding."""


def load(name: str) -> Any:
    return importlib.import_module(f"engine.{name}")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype) * 3


def assert_rows(actual: Fp8Rows, expected: Fp8Rows) -> None:
    """Equal scales; numbers equal up to one step of e4m3 (another rounding of the division)."""
    torch.testing.assert_close(actual.scale_TG, expected.scale_TG, rtol=2e-2, atol=0)
    assert actual.scale_TG.stride() == expected.scale_TG.stride()
    difference = (actual.dequantize() - expected.dequantize()).norm()
    # Triton's interpreter cuts to e4m3 where a GPU rounds.
    tolerance = 0.15 if IS_INTERPRETED else 2e-2
    assert difference <= tolerance * expected.dequantize().norm()
    assert not actual.dequantize().isnan().any()


def packed(num_rows: int, num_columns: int) -> Fp8Rows:
    size = (num_rows, packed_row_bytes(num_columns))
    return Fp8Rows.packed(torch.empty(size, dtype=torch.uint8, device=DEVICE), num_columns)


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_quantize_rows(num_tokens: int) -> None:
    x = draw(num_tokens, HIDDEN + 128)[:, 64:-64]  # a strided view
    x[0, :128] = 0.0
    actual, expected = load("kernels.fused.quant").quantize_rows(x), reference.quantize_rows(x)
    assert torch.equal(actual.scale_TG, expected.scale_TG)
    assert_rows(actual, expected)
    error = (actual.dequantize() - x.float()).norm() / x.float().norm()
    assert error < (0.125 if IS_INTERPRETED else 0.03)  # e4m3 has 3 bits of mantissa
    travelling = load("kernels.fused.quant").quantize_rows(x, packed(num_tokens, HIDDEN))
    assert torch.equal(travelling.dequantize(), actual.dequantize())


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_silu_and_mul_fp8(num_tokens: int) -> None:
    x = draw(num_tokens, 2 * HIDDEN)
    gate, up = x.float().chunk(2, dim=1)
    expected = reference.quantize_rows(torch.nn.functional.silu(gate) * up)
    assert_rows(load("ops.activation_kernel").silu_and_mul_fp8(x), expected)


def test_silu_and_mul_fp8_skips_blocks_of_no_expert() -> None:
    x = draw(256, 256)
    experts = torch.tensor([3] * 128 + [-1] * 128, dtype=torch.int32, device=DEVICE)
    out = load("ops.activation_kernel").silu_and_mul_fp8(x, experts)
    assert out.scale_TG[128:].isnan().all()
    assert not out.scale_TG[:128].isnan().any()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", [128, 512, 1536, HIDDEN])
def test_rms_norm(num_tokens: int, size: int) -> None:
    norm = load("ops.norm_kernel")
    x, weight, delta = draw(num_tokens, size + 64)[:, :size], draw(size), draw(num_tokens, size)
    expected = RMS_NORM.reference(x, weight, 1e-6)
    # bf16 has 8 bits: one unit in the last place
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), expected, rtol=BF16, atol=1e-3)
    same, _, rows = norm.add_rms_norm_fp8(x, None, weight, 1e-6, with_plain=False)
    assert same is x
    assert_rows(rows, reference.quantize_rows(expected))
    total, normed = norm.add_rms_norm(x, delta, weight, 1e-6)
    assert_sum(total, x, delta)
    expected = RMS_NORM.reference(total, weight, 1e-6)
    torch.testing.assert_close(normed, expected, rtol=BF16, atol=1e-3)


def assert_sum(total: Tensor, x: Tensor, delta: Tensor) -> None:
    """Equal; Triton's interpreter cuts to bfloat16 where a GPU rounds."""
    tolerance = BF16 if IS_INTERPRETED else 0.0
    torch.testing.assert_close(total, x + delta, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("size", [512, HIDDEN])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("with_plain", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_add_rms_norm_fp8(
    num_tokens: int, size: int, with_delta: bool, with_plain: bool, is_packed: bool
) -> None:
    x, weight = draw(num_tokens, size), draw(size)
    delta = draw(num_tokens, size) if with_delta else None
    out = packed(num_tokens, size) if is_packed else None
    total, normed, rows = load("ops.norm_kernel").add_rms_norm_fp8(
        x, delta, weight, 1e-6, with_plain=with_plain, out=out
    )
    if delta is None:
        assert total is x
    else:
        assert_sum(total, x, delta)
    expected = RMS_NORM.reference(total, weight, 1e-6)
    assert (normed is not None) == with_plain
    if normed is not None:
        torch.testing.assert_close(normed, expected, rtol=BF16, atol=1e-3)
    assert (rows is out) == is_packed
    assert_rows(rows, reference.quantize_rows(expected, packed(num_tokens, size) if out else None))


def draw_routing(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    scores = torch.rand(num_tokens, num_experts, device=DEVICE)
    return scores.topk(top_k, dim=1).indices


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("first", "num_local"), [(0, 16), (4, 4), (15, 1)])
def test_moe_align_block_size(num_tokens: int, first: int, num_local: int) -> None:
    ids = draw_routing(num_tokens, 16, 4)
    actual = load("ops.permute_kernel").moe_align_block_size(ids, first, num_local)
    expected = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local)
    assert torch.equal(actual.rows_TK, expected.rows_TK)
    assert torch.equal(actual.expert_M, expected.expert_M)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("first", "num_local"), [(0, 16), (4, 4), (15, 1)])
@pytest.mark.parametrize("capacity", [0, 128, 640])
@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_behind_the_capacity_know_their_token(
    num_tokens: int, first: int, num_local: int, capacity: int, is_packed: bool
) -> None:
    permute, ids = load("ops.permute_kernel"), draw_routing(num_tokens, 16, 4)
    actual: Alignment = permute.moe_align_block_size(ids, first, num_local, capacity)
    expected = MOE_ALIGN_BLOCK_SIZE.reference(ids, first, num_local, capacity)
    assert torch.equal(actual.rows_TK, expected.rows_TK)
    assert torch.equal(actual.expert_M, expected.expert_M)
    assert actual.capacity == expected.capacity == capacity
    assert (actual.overflow is None) == (expected.overflow is None)
    if actual.overflow is not None and expected.overflow is not None:
        assert torch.equal(actual.overflow.ends_E, expected.overflow.ends_E)
        is_used = expected.overflow.token_V >= 0
        named = actual.overflow.token_V[is_used]
        assert torch.equal(named, expected.overflow.token_V[is_used])
    source = packed(num_tokens, HIDDEN) if is_packed else None
    rows = reference.quantize_rows(draw(num_tokens, HIDDEN), source)
    spread = permute.permute_rows(rows, actual)
    assert spread.num_rows == actual.capacity
    pairs = actual.rows_TK.flatten().long()
    is_before = (pairs >= 0) & (pairs < actual.capacity)
    tokens = torch.arange(num_tokens, device=DEVICE).repeat_interleave(4)[is_before]
    assert torch.equal(spread.dequantize()[pairs[is_before]], rows.dequantize()[tokens])


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("first", "num_local"), [(0, 256), (32, 32), (255, 1)])
def test_count_rows_and_place_them(num_tokens: int, first: int, num_local: int) -> None:
    permute = load("ops.permute_kernel")
    ids = draw_routing(num_tokens, 256, 8)
    ids[0, 0] = -1  # no expert at all
    counts = permute.count_rows(ids, first, num_local)
    expected = COUNT_ROWS.reference(ids, first, num_local)
    assert torch.equal(counts.rows_TK, expected.rows_TK)
    assert torch.equal(counts.ends_E, expected.ends_E)
    assert torch.equal(counts.expert_M, expected.expert_M)
    num_rows = int(counts.num_rows)
    actual = counts.lay_out(num_rows)
    assert torch.equal(actual.expert_M, expected.lay_out(num_rows).expert_M)


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_routing_is_read_where_it_arrived(num_tokens: int) -> None:
    """Ids and weights as neighbouring columns of one message."""
    permute = load("ops.permute_kernel")
    ids, weights = draw_routing(num_tokens, 256, 8), torch.rand(num_tokens, 8, device=DEVICE)
    message = torch.cat((ids.int(), weights.view(torch.int32)), dim=1)
    counts = permute.count_rows(message[:, :8], 32, 32)
    expected = COUNT_ROWS.reference(ids, 32, 32)
    assert torch.equal(counts.rows_TK, expected.rows_TK)
    assert torch.equal(counts.expert_M, expected.expert_M)
    alignment = counts.lay_out(int(counts.num_rows))
    out = draw(alignment.expert_M.shape[0], HIDDEN)
    arrived = message[:, 8:].view(torch.float32)
    actual = permute.unpermute_rows(out, alignment, arrived, None)
    assert torch.equal(actual, permute.unpermute_rows(out, alignment, weights, None))


def test_no_token_and_no_row() -> None:
    permute = load("ops.permute_kernel")
    weights = torch.rand(3, 2, device=DEVICE)
    for ids in torch.zeros((0, 2), device=DEVICE).long(), torch.zeros((3, 2), device=DEVICE).long():
        counts = permute.count_rows(ids, 5, 4)
        assert int(counts.num_rows) == 0
        alignment = counts.lay_out(0)
        spread = permute.permute_rows(reference.quantize_rows(draw(len(ids), HIDDEN)), alignment)
        assert spread.num_rows == 0
        source = torch.zeros((0, HIDDEN), dtype=torch.bfloat16, device=DEVICE)
        home = permute.unpermute_rows(source, alignment, weights[: len(ids)], None)
        assert home.shape == (len(ids), HIDDEN)
        assert (home == 0).all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("first", "num_local"), [(0, 16), (4, 4)])
@pytest.mark.parametrize("with_own", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_go_to_experts_and_home(
    num_tokens: int, first: int, num_local: int, with_own: bool, is_packed: bool
) -> None:
    permute = load("ops.permute_kernel")
    source = packed(num_tokens, HIDDEN) if is_packed else None
    rows = reference.quantize_rows(draw(num_tokens, HIDDEN), source)
    alignment = MOE_ALIGN_BLOCK_SIZE.reference(draw_routing(num_tokens, 16, 4), first, num_local)
    spread = permute.permute_rows(rows, alignment)
    pairs = alignment.rows_TK.flatten()
    tokens = torch.arange(num_tokens, device=DEVICE).repeat_interleave(4)[pairs >= 0]
    used = pairs[pairs >= 0].long()
    raw = spread.data_TK.view(torch.uint8)
    assert torch.equal(raw[used], rows.data_TK.view(torch.uint8)[tokens])
    assert torch.equal(spread.scale_TG[used], rows.scale_TG[tokens])
    out = draw(alignment.expert_M.shape[0], HIDDEN)
    unused = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    unused[used] = False
    out[unused] = float("nan")  # rows of no token are never read
    own = draw(num_tokens, HIDDEN) if with_own else None
    weights = torch.rand(num_tokens, 4, device=DEVICE)
    actual = permute.unpermute_rows(out, alignment, weights, own)
    expected = UNPERMUTE_ROWS.reference(out, alignment, weights, own)
    torch.testing.assert_close(actual, expected, rtol=BF16, atol=1e-2)


def test_every_expert_without_rows_is_skipped() -> None:
    ids = torch.full((3, 1), 2, device=DEVICE)
    actual: Alignment = load("ops.permute_kernel").moe_align_block_size(ids, 0, 4)
    assert actual.rows_TK.flatten().tolist() == [0, 1, 2]
    assert sorted(set(actual.expert_M.tolist())) == [-1, 2]


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
@pytest.mark.parametrize(("first", "num_local"), [(0, 256), (32, 32), (255, 1)])
def test_moe_align_masked(num_tokens: int, first: int, num_local: int) -> None:
    ids = draw_routing(num_tokens, 256, 8)
    ids[:1, 0] = -1  # no expert at all
    actual, expected = (
        module.moe_align_masked(ids, first, num_local, 384, expected_rows=7)
        for module in (load("ops.masked_kernel"), load("ops.masked"))
    )
    assert torch.equal(actual.rows_TK, expected.rows_TK)
    assert torch.equal(actual.num_rows_L, expected.num_rows_L)
    assert (actual.max_rows, actual.expected_rows) == (384, 7)


def test_many_tokens_at_one_expert() -> None:
    ids = torch.zeros((2000, 1), device=DEVICE).long()  # more than one block of pairs
    places = load("ops.masked_kernel").moe_align_masked(ids, 0, 3, 2048)
    assert torch.equal(places.rows_TK.flatten().cpu(), torch.arange(2000, dtype=torch.int32))
    assert places.num_rows_L.tolist() == [2000, 0, 0]


@pytest.mark.parametrize("num_tokens", [1, 5, 200])
@pytest.mark.parametrize("is_packed", [True, False])
def test_rows_go_to_masked_places_and_home(num_tokens: int, is_packed: bool) -> None:
    source = packed(num_tokens, HIDDEN) if is_packed else None
    rows = reference.quantize_rows(draw(num_tokens, HIDDEN), source)
    places = MOE_ALIGN_MASKED.reference(draw_routing(num_tokens, 16, 4), 2, 6, 256)
    actual = load("ops.masked_kernel").permute_masked_rows(rows, places)
    expected = PERMUTE_MASKED_ROWS.reference(rows, places)
    used = torch.arange(256, device=DEVICE) < places.num_rows_L.unsqueeze(1)
    raw, expected_raw = (r.data_LMD.view(torch.uint8) for r in (actual, expected))
    assert torch.equal(raw[used], expected_raw[used])
    assert torch.equal(actual.scale_LMG[used], expected.scale_LMG[used])
    assert actual.scale_LMG.stride() == expected.scale_LMG.stride()
    assert actual.scale_LMG[~used].isnan().all(), "rows that are not in use stay untouched"
    out = draw(6, 256, HIDDEN)
    out[~used] = float("nan")
    weights = torch.rand(num_tokens, 4, device=DEVICE)
    home, expected_home = (
        module.unpermute_rows(out.flatten(0, 1), places, weights, None)
        for module in (load("ops.permute_kernel"), load("ops.permute"))
    )
    torch.testing.assert_close(home, expected_home, rtol=BF16, atol=1e-2)


@pytest.mark.parametrize("expected_rows", [1, 20, 1000])
@pytest.mark.parametrize("counts", [[0, 128, 1, 77], [0, 0, 0, 0]])
def test_masked_silu_and_mul_fp8(expected_rows: int, counts: list[int]) -> None:
    x = draw(4, 128, 512)
    like = MaskedRows(
        data_LMD=x,  # not read
        scale_LMG=x,
        num_rows_L=torch.tensor(counts, dtype=torch.int32, device=DEVICE),
        expected_rows=expected_rows,
    )
    actual = load("ops.masked_kernel").masked_silu_and_mul_fp8(x, like)
    assert actual.scale_LMG.stride() == (2 * 128, 1, 128)
    for expert, count in enumerate(counts):
        gate, up = x[expert, :count].float().chunk(2, dim=1)
        expected = reference.quantize_rows(torch.nn.functional.silu(gate) * up)
        mine = Fp8Rows(
            data_TK=actual.data_LMD[expert, :count], scale_TG=actual.scale_LMG[expert, :count]
        ).dequantize()
        difference = (mine - expected.dequantize()).norm()
        assert difference <= (0.15 if IS_INTERPRETED else 2e-2) * expected.dequantize().norm()
        assert actual.scale_LMG[expert, count:].isnan().all(), "untouched"
        assert (actual.data_LMD[expert, count:].view(torch.uint8) == 0xFF).all(), "untouched"


@pytest.mark.parametrize("num_tokens", [0, *TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_merge_attention(num_tokens: int, dtype: torch.dtype) -> None:
    out, other = (draw(num_tokens, 6, 128, dtype=dtype) for _ in range(2))
    lse, other_lse = (draw(6, num_tokens, dtype=torch.float32) * 3 for _ in range(2))
    lse[0], other_lse[:2] = float("-inf"), float("-inf")  # parts that saw nothing
    expected, expected_lse = reference.merge_attention(out.clone(), lse.clone(), other, other_lse)
    merged, merged_lse = load("kernels.fused.attention").merge_attention(out, lse, other, other_lse)
    assert merged is out
    torch.testing.assert_close(merged, expected, rtol=BF16, atol=1e-2)
    torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-4, atol=1e-4)
    assert (merged[:, 0] == 0).all()


def draw_rotation(num_tokens: int, rope: int, interleave: bool) -> Rotation:
    angles = torch.rand(num_tokens, rope // 2, device=DEVICE) * 6
    return Rotation(cos=angles.cos(), sin=angles.sin(), interleave=interleave)


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("num_heads", [1, 3, 16, 128])
def test_rotate_queries(num_tokens: int, interleave: bool, num_heads: int) -> None:
    q = draw(num_tokens, num_heads, 192)
    rotation = draw_rotation(num_tokens, 64, interleave)
    expected = ROTATE_QUERIES.reference(q.clone(), rotation)
    actual = load("ops.latents_kernel").rotate_queries(q, rotation)
    assert actual is q
    torch.testing.assert_close(actual, expected, rtol=BF16, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_store_latents(num_tokens: int, interleave: bool, dtype: torch.dtype) -> None:
    latents, weight = draw(num_tokens, 1536 + 576)[:, 1536:], draw(512)
    rotation = draw_rotation(num_tokens, 64, interleave)
    slots = torch.randperm(4 * 64, device=DEVICE)[:num_tokens]
    pools = [torch.full((4, 3, 64, 576), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    for module, pool in zip((load("ops.latents_kernel"), load("ops.latents")), pools, strict=True):
        module.store_latents(latents, weight, 1e-6, rotation, cache=pool[:, 1], slots_T=slots)
    torch.testing.assert_close(pools[0], pools[1], rtol=BF16, atol=1e-3)
    assert (pools[0][:, 0] == 7.0).all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("num_heads", [3, 16, 128])
def test_join_keys(num_tokens: int, num_heads: int) -> None:
    expanded = draw(num_tokens, num_heads, 256)[..., :128]
    k_pe = draw(num_tokens, 576)[:, 512:]
    actual = load("ops.latents_kernel").join_keys(expanded, k_pe)
    assert torch.equal(actual, JOIN_KEYS.reference(expanded, k_pe))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (256, RoutingRule(top_k=8, n_group=8, topk_group=4, norm_topk_prob=True,
                          routed_scaling_factor=2.5)),
        (16, RoutingRule(top_k=3, n_group=1, topk_group=1, norm_topk_prob=False,
                         routed_scaling_factor=1.0)),
    ],
)  # fmt: skip
def test_group_limited_topk(num_tokens: int, num_experts: int, rule: RoutingRule) -> None:
    routing = load("ops.gate_kernel")
    assert routing.is_supported(num_experts, rule)
    logits = torch.randn(num_tokens, num_experts, device=DEVICE)
    bias = torch.randn(num_experts, device=DEVICE) * 0.1
    ids, weights = routing.group_limited_topk(logits, bias, rule)
    expected_ids, expected_weights = GROUP_LIMITED_TOPK.reference(logits, bias, rule)
    order, expected_order = ids.argsort(dim=1), expected_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=1e-4, atol=1e-5
    )
