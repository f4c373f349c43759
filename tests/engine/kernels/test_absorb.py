"""The way into absorbed attention's latent space and out, written out sum by sum."""

from dataclasses import replace

import torch

from engine.attention import absorb_reference
from engine.attention.latent_storage import take_blocks
from engine.attention.paged_queries import PagedQueries
from engine.attention.rectangle import Rectangle
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels import reference
from engine.kernels.rotation import Rotation
from engine.ops.latents import SPLIT_LATENTS, STORE_LATENTS, apply_rotary
from engine.ops.norm import RMS_NORM

TOKENS, HEADS, ROPE, RANK = 5, 3, 8, 256
ROWS = PagedQueries(block_tables_SB=torch.zeros(1, 1), seq_lens_S=torch.ones(1))


def rotation() -> Rotation:
    angles = torch.rand(TOKENS, ROPE // 2) * 6
    return Rotation(cos=angles.cos(), sin=angles.sin())


def test_queries_are_carried_into_the_latent_space() -> None:
    weight, turn = torch.randn(HEADS, 16, RANK), rotation()
    q = torch.randn(TOKENS, HEADS, 16 + ROPE)
    rotated = apply_rotary(q[..., 16:], turn.cos, turn.sin)
    expected = torch.einsum("thn,hnc->thc", q[..., :16], weight)
    actual = absorb_reference.absorb_queries(q, weight, turn, torch.empty(0), ROWS)
    torch.testing.assert_close(actual, torch.cat((expected, rotated), dim=-1))


def test_values_are_taken_out_of_it() -> None:
    weight, latents = torch.randn(HEADS, 128, RANK), torch.randn(TOKENS, HEADS, RANK)
    expected = torch.einsum("thc,hvc->thv", latents, weight).flatten(1)
    plain = absorb_reference.expand_values(latents, weight, ROWS, fp8=False)
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(plain, expected, rtol=1e-5, atol=1e-4)
    rows = absorb_reference.expand_values(latents, weight, ROWS, fp8=True)
    assert isinstance(rows, Fp8Rows)
    assert torch.equal(rows.dequantize(), reference.quantize_rows(plain).dequantize())


def test_a_projection_is_split_into_queries_and_what_is_stored() -> None:
    q_rank, weight, q_weight = 128, torch.randn(RANK), torch.randn(128)
    source, turn = torch.randn(TOKENS, q_rank + RANK + ROPE), rotation()
    pools = [torch.zeros(2, 4, RANK + ROPE) for _ in range(2)]
    slots = torch.tensor([6, 1, 7, 0, 3])
    rows = SPLIT_LATENTS.reference(
        source, q_weight, weight, 1e-6, turn, cache=pools[0], slots_T=slots
    )
    normed = RMS_NORM.reference(source[:, :q_rank], q_weight, 1e-6)
    assert torch.equal(rows.dequantize(), reference.quantize_rows(normed).dequantize())
    STORE_LATENTS.reference(source[:, q_rank:], weight, 1e-6, turn, cache=pools[1], slots_T=slots)
    assert torch.equal(pools[0], pools[1])
    stored = take_blocks(pools[0], torch.tensor([0, 1])).flatten(0, 1)[slots]
    assert (stored.abs().sum(dim=1) > 0).all()


def test_a_rectangle_is_laid_out_on_the_way_in_and_found_again_on_the_way_out() -> None:
    starts = torch.tensor([0, 3, 4, 5], dtype=torch.int32)
    rectangle = Rectangle.of(starts, 3, TOKENS)
    queries = replace(ROWS, rectangle=rectangle)
    weight, turn = torch.randn(HEADS, 16, RANK), rotation()
    q = torch.randn(TOKENS, HEADS, 16 + ROPE)
    plain = absorb_reference.absorb_queries(q.clone(), weight, turn, torch.empty(0), ROWS)
    spread = absorb_reference.absorb_queries(q, weight, turn, torch.empty(0), queries)
    assert spread.shape[0] == 9
    assert torch.equal(spread[rectangle.places], plain)
    latents, w_uv = torch.randn(9, HEADS, RANK), torch.randn(HEADS, 128, RANK)
    values = absorb_reference.expand_values(latents, w_uv, queries, fp8=False)
    expected = absorb_reference.expand_values(latents[rectangle.places], w_uv, ROWS, fp8=False)
    assert isinstance(values, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(values, expected)
