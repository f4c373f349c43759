"""Drafts that are lost by force are wrong ones, from which a budget learns as from any others."""

import pytest
import torch

from bench.engine.drafted import lose_drafts
from decode.draft_survival import DraftSurvival
from engine.request import Request
from engine.sampling.token_mask import NO_DRAFT
from runtime.sampling import SamplingParams

VOCAB_SIZE, TOKEN = 100, 99


def test_a_share_is_left_and_what_is_no_draft_stays_none() -> None:
    torch.manual_seed(0)
    drafts = torch.full((5000, 3), TOKEN)
    drafts[::2, 2] = NO_DRAFT
    lose_drafts(drafts, 0.85, VOCAB_SIZE)
    assert (drafts[::2, 2] == NO_DRAFT).all()
    kept = (drafts == TOKEN).float().mean(dim=0)
    assert kept[:2] == pytest.approx(0.85, abs=0.02)
    assert (drafts[drafts != TOKEN] <= 0).all(), "the token behind it, or none"


def test_a_budget_learns_the_share_that_is_left() -> None:
    """Lost drafts that are not verified would make every place look as if it were always right."""
    torch.manual_seed(0)
    survival = DraftSurvival(3)
    request = Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams())
    for _ in range(2000):
        drafts = torch.full((1, 3), TOKEN)
        lose_drafts(drafts, 0.6, VOCAB_SIZE)
        is_right = (drafts[0] == TOKEN).int()
        survival.saw(request, int((drafts != NO_DRAFT).sum()), int(is_right.cumprod(0).sum()))
    new = Request(request_id="b", prompt_token_ids=[1], sampling=SamplingParams())
    assert survival.expected([new]) == pytest.approx([1.0, 1.6, 1.96, 2.176], abs=0.1)
