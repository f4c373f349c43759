"""Rounds are the same as bytes, and read one by one."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from experts.moves import Move, Round
from experts.told_rounds import ToldRounds

NUMBERS = st.integers(0, 400)
MOVES = st.builds(
    Move,
    layer=NUMBERS,
    slot=NUMBERS,
    expert=NUMBERS,
    replaced=NUMBERS,
    sources=st.lists(NUMBERS, min_size=1, max_size=3).map(tuple),
)
ROUNDS = st.lists(st.lists(MOVES, min_size=1, max_size=4).map(tuple), max_size=5)


@given(rounds=ROUNDS)
def test_what_is_read_is_what_was_told(rounds: list[Round]) -> None:
    told = ToldRounds.of(rounds)
    assert ToldRounds.of(told) is told
    heard = pickle.loads(pickle.dumps(ToldRounds(told.encoded)))
    assert heard == told
    assert list(heard) == rounds
    assert heard[:2] == rounds[:2]
    assert [len(heard), heard.num_moves] == [len(rounds), sum(map(len, rounds))]
    assert bool(heard) == bool(rounds)
