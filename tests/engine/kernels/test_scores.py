"""Scores are float32 in both forms of attention, whatever type queries and keys have."""

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.reference import as_factor, multiply_scores, softmax_
from tests.engine.relative_error import relative_error

WEIGHTS_ONLY = 3e-3
"""What rounding probabilities and results to bfloat16 costs. Scores of this size rounded as well
cost more than 1 %."""


def draw(*shape: int, seed: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16()


def test_products_of_16_bits_are_exact() -> None:
    q, k = draw(2, 5, 64, seed=0), draw(2, 64, 7, seed=1)
    scores = multiply_scores(as_factor(q), as_factor(k))
    assert scores.dtype == torch.float32
    assert relative_error(scores, q.double() @ k.double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_numbers_stay_wide(dtype: torch.dtype) -> None:
    assert as_factor(torch.zeros(1, dtype=dtype)).dtype == dtype


def test_softmax_in_place() -> None:
    scores = torch.randn(3, 4, 9) * 20
    scores[..., 5:] = float("-inf")
    expected = scores.softmax(dim=-1)
    probs = softmax_(scores)
    assert probs.data_ptr() == scores.data_ptr()
    torch.testing.assert_close(probs, expected)


def test_the_absorbed_form_rounds_no_score() -> None:
    q, latents = draw(1, 3, 4, 48, seed=2) * 3, draw(1, 200, 48, seed=3)
    hidden = torch.zeros(1, 3, 200, dtype=torch.bool)
    out = reference.absorbed_attention(q, latents, hidden, 32, 0.3)
    assert out.dtype == torch.bfloat16
    probs = (torch.einsum("sqhl,spl->sqhp", q.double(), latents.double()) * 0.3).softmax(dim=-1)
    expected = torch.einsum("sqhp,spc->sqhc", probs, latents[..., :32].double())
    assert relative_error(out, expected) < WEIGHTS_ONLY


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_decompressed_form_rounds_no_score(is_causal: bool) -> None:
    q, k, v = draw(4, 3, 48, seed=4) * 3, draw(200, 3, 48, seed=5), draw(200, 3, 32, seed=6)
    out, lse = reference.varlen_attention_part(q, k, v, [(4, 200)], 0.3, is_causal=is_causal)
    scores = torch.einsum("qha,pha->hqp", q.double(), k.double()) * 0.3
    if is_causal:
        own = torch.arange(196, 200)
        scores.masked_fill_(torch.arange(200) > own[:, None], float("-inf"))
    expected = torch.einsum("hqp,phv->qhv", scores.softmax(dim=-1), v.double())
    assert relative_error(out, expected) < WEIGHTS_ONLY
    assert relative_error(lse, scores.logsumexp(dim=-1)) < 1e-5
