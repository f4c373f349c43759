"""One conclusion from all ranks' words, and none where ranks have experts unlike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.experts.votes import PlacementMismatchError, Verdict, Vote, Word, conclude

VOTES = st.lists(st.sampled_from(Vote), min_size=1, max_size=8)


@given(votes=VOTES)
def test_one_failure_retreats_and_one_that_waits_holds_all(votes: list[Vote]) -> None:
    verdict = conclude([Word(7, 3, vote) for vote in votes])
    assert (verdict is Verdict.RETREAT) == (Vote.FAILED in votes)
    assert (verdict is Verdict.GO) == (set(votes) == {Vote.READY})


def test_ranks_that_never_rebalance_say_nothing() -> None:
    assert conclude([Word()] * 4) is Verdict.WAIT


@pytest.mark.parametrize("other", [Word(8, 3), Word(7, 4)])
def test_a_rank_that_missed_a_flip_is_named(other: Word) -> None:
    with pytest.raises(PlacementMismatchError, match="rank 2 has experts as in placement"):
        conclude([Word(7, 3), Word(7, 3), other])
