"""The plain operations against their definitions, written out as loops."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import reference
from engine.ops.activation import SILU_AND_MUL
from engine.ops.gate import GROUP_LIMITED_TOPK
from engine.ops.latents import apply_rotary
from engine.ops.norm import RMS_NORM
from engine.ops.routing_rule import RoutingRule

SEEDS = st.integers(0, 2**31)


def _randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_its_definition() -> None:
    x, weight = _randn(0, 5, 12), _randn(1, 12)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    torch.testing.assert_close(RMS_NORM.reference(x, weight, 1e-3), expected)


def test_rms_norm_computes_in_float32() -> None:
    x = _randn(0, 4, 256).bfloat16() * 300
    out = RMS_NORM.reference(x, torch.ones(256, dtype=torch.bfloat16), 1e-6)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(
        out.float(), RMS_NORM.reference(x.float(), torch.ones(256), 1e-6), rtol=1e-2, atol=1e-2
    )


def test_silu_and_mul() -> None:
    gate, up = _randn(0, 3, 4), _randn(1, 3, 4)
    out = SILU_AND_MUL.reference(torch.cat((gate, up), -1))
    torch.testing.assert_close(out, gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("interleave", [True, False])
@given(seed=SEEDS, first=st.integers(0, 5000), shift=st.integers(0, 5000))
def test_rotation_depends_on_distance_only(
    interleave: bool, seed: int, first: int, shift: int
) -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    q, k = _randn(seed, 1, 2, 6), _randn(seed + 1, 1, 2, 6)

    def score(q_position: int, k_position: int) -> Tensor:
        angles = torch.tensor([[q_position], [k_position]]) * frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        q_rot = apply_rotary(q, cos[:1], sin[:1], interleave=interleave)
        k_rot = apply_rotary(k, cos[1:], sin[1:], interleave=interleave)
        return (q_rot * k_rot).sum(-1)

    here, there = score(first + 3, first), score(first + shift + 3, first + shift)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)


def test_rotary_layouts_are_permutations_of_each_other() -> None:
    x, angles = _randn(0, 4, 6), _randn(1, 4, 3)
    halves = torch.cat((x[:, 0::2], x[:, 1::2]), -1)
    interleaved = apply_rotary(x, angles.cos(), angles.sin())
    split = apply_rotary(halves, angles.cos(), angles.sin(), interleave=False)
    torch.testing.assert_close(torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), -1), split)


def _route_by_loops(
    logits: list[float], bias: list[float], *, top_k: int, n_group: int, topk_group: int
) -> set[int]:
    choice = [1 / (1 + math.exp(-x)) + b for x, b in zip(logits, bias, strict=True)]
    size = len(choice) // n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(n_group)]
    by_score = sorted(range(n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))
    allowed = [e for g in by_score[:topk_group] for e in range(g * size, (g + 1) * size)]
    return set(sorted(allowed, key=lambda e: -choice[e])[:top_k])


@given(seed=SEEDS, n_group=st.sampled_from([1, 2, 4]), data=st.data())
def test_routing_is_its_definition(seed: int, n_group: int, data: st.DataObject) -> None:
    topk_group = data.draw(st.integers(1, n_group))
    top_k = data.draw(st.integers(1, topk_group * 8 // n_group))
    logits, bias = _randn(seed, 5, 8).double(), _randn(seed + 1, 8).double()
    ids, weights = GROUP_LIMITED_TOPK.reference(
        logits,
        bias,
        RoutingRule(
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
    )
    for token in range(5):
        expected = _route_by_loops(
            logits[token].tolist(),
            bias.tolist(),
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
        )
        assert set(ids[token].tolist()) == expected
    # The bias moves the choice, never the weight; the factor is applied once.
    scores = logits.sigmoid().gather(1, ids)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("num_rows", [-3, 0, 2, 5, 9])
def test_padding_chooses_no_expert(num_rows: int) -> None:
    rule = RoutingRule(
        top_k=2, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    logits, bias = _randn(0, 5, 8), _randn(1, 8)
    ids, weights = GROUP_LIMITED_TOPK.reference(logits, bias, rule, torch.tensor([num_rows]))
    plain_ids, plain_weights = GROUP_LIMITED_TOPK.reference(logits, bias, rule)
    real = max(num_rows, 0)
    assert ids[:real].equal(plain_ids[:real])
    assert ids[real:].eq(-1).all()
    assert weights.equal(plain_weights)


@pytest.mark.parametrize("num_rows", [None, -3, 0, 2, 9])
def test_choices_are_counted_without_padding(num_rows: int | None) -> None:
    rule = RoutingRule(
        top_k=2, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5
    )
    logits, bias = _randn(0, 5, 8), _randn(1, 8)
    count = None if num_rows is None else torch.tensor([num_rows])
    load = torch.arange(9)
    ids, _ = GROUP_LIMITED_TOPK.reference(logits, bias, rule, count, load)
    chosen = ids[ids >= 0].bincount(minlength=8)
    assert load[:-1].equal(torch.arange(8) + chosen)


def test_weights_without_normalisation_are_scores() -> None:
    logits = _randn(0, 3, 4)
    ids, weights = GROUP_LIMITED_TOPK.reference(
        logits,
        torch.zeros(4),
        RoutingRule(
            top_k=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            routed_scaling_factor=0.5,
        ),
    )
    torch.testing.assert_close(weights, 0.5 * logits.sigmoid().gather(1, ids))


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 0], [0, 5, 0]])
def test_grouped_mlp_runs_each_expert_on_its_rows(counts: list[int]) -> None:
    rows, w13, w2 = _randn(0, sum(counts), 6), _randn(1, 3, 8, 6), _randn(2, 3, 6, 4)
    out = reference.grouped_mlp(rows, counts, w13, w2)
    experts = [e for e, count in enumerate(counts) for _ in range(count)]
    for row, expert in enumerate(experts):
        gate, up = w13[expert, :4] @ rows[row], w13[expert, 4:] @ rows[row]
        expected = w2[expert] @ (torch.nn.functional.silu(gate) * up)
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)
    assert out.shape == rows.shape


@pytest.mark.parametrize("num_queries", [1, 5, 9, 300, 513])
@pytest.mark.parametrize("prefix", [0, 3])
def test_causal_attention_is_its_definition(num_queries: int, prefix: int) -> None:
    num_positions = num_queries + prefix
    q, k = _randn(0, num_queries, 2, 6), _randn(1, num_positions, 2, 6)
    v = _randn(2, num_positions, 2, 4)
    scores = torch.einsum("qha,pha->hqp", q, k) * 0.3
    after = torch.arange(num_positions) > torch.arange(prefix, num_positions).unsqueeze(1)
    probs = scores.masked_fill(after, float("-inf")).softmax(-1)
    expected = torch.einsum("hqp,phv->qhv", probs, v)
    torch.testing.assert_close(reference.causal_attention(q, k, v, 0.3), expected)


@given(seed=SEEDS, cuts=st.lists(st.integers(1, 39), max_size=3, unique=True))
def test_attention_in_parts_is_attention(seed: int, cuts: list[int]) -> None:
    """Two sequences with 7 and 3 queries after prefixes of 40 and 45."""
    lengths = [(7, 47), (3, 48)]
    q, k, v = _randn(seed, 10, 2, 6), _randn(seed + 1, 95, 2, 6), _randn(seed + 2, 95, 2, 4)
    expected = reference.varlen_attention(q, k, v, lengths, 0.3)
    edges = [0, *sorted(cuts)]
    spans = [*pairwise(edges), (edges[-1], None)]
    out, lse = torch.zeros(10, 2, 4), torch.full((2, 10), float("-inf"))
    for start, end in spans:
        some_k, some_v = (torch.cat([x[:47][start:end], x[47:][start:end]]) for x in (k, v))
        counts = [len(range(*slice(start, end).indices(p))) for _, p in lengths]
        part, part_lse = reference.varlen_attention_part(
            q, some_k, some_v, [(7, counts[0]), (3, counts[1])], 0.3, is_causal=end is None
        )
        merged, lse = reference.merge_attention(out, lse, part, part_lse)
        assert merged is out
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert lse.isfinite().all()


def test_the_logarithm_is_that_of_all_positions() -> None:
    q, k, v = _randn(0, 3, 2, 6), _randn(1, 5, 2, 6), _randn(2, 5, 2, 4)
    _, lse = reference.varlen_attention_part(q, k, v, [(3, 5)], 0.3, is_causal=False)
    scores = torch.einsum("qha,pha->hqp", q, k) * 0.3
    torch.testing.assert_close(lse, scores.exp().sum(-1).log())


def test_parts_that_saw_nothing_count_for_nothing() -> None:
    out, other = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 2), 5.0)
    nothing = torch.full((1, 1), float("-inf"))
    merged, lse = reference.merge_attention(other.clone(), torch.zeros(1, 1), out, nothing.clone())
    assert merged.tolist() == [[[5.0, 5.0]]]
    assert lse.item() == 0.0
    merged, lse = reference.merge_attention(out.clone(), nothing.clone(), other, nothing.clone())
    assert merged.tolist() == [[[0.0, 0.0]]]
    assert lse.item() == float("-inf")


def test_absorbed_attention_is_multi_query_attention() -> None:
    q, latents = _randn(0, 3, 2, 4, 6), _randn(1, 3, 7, 6)
    hidden = torch.arange(7) > torch.tensor([[2, 3], [5, 6], [0, 1]]).unsqueeze(2)
    scores = torch.einsum("sqhl,spl->sqhp", q, latents) * 0.5
    probs = scores.masked_fill(hidden.unsqueeze(2), float("-inf")).softmax(-1)
    expected = torch.einsum("sqhp,spc->sqhc", probs, latents[..., :4])
    out = reference.absorbed_attention(q, latents, hidden, 4, 0.5)
    torch.testing.assert_close(out, expected)
