"""Which tokens may come next: against a plain reading of the constraint, and by replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grammar.matcher import Matcher, fill_masks, num_mask_words
from runtime.errors import InternalError, InvalidRequestError
from runtime.sampling import OutputConstraint
from tests.grammar.fakes import VOCAB, ListedGrammar, tokens_of

STOP = 69
ALL = set(range(VOCAB))
few_tokens = st.integers(0, 3)
outputs = st.lists(st.lists(few_tokens, min_size=1, max_size=5).map(tuple), min_size=1, max_size=5)


def make(
    listed: Sequence[tuple[int, ...]] | None = None,
    *,
    starts_after: Sequence[int] = (),
    max_tokens_before: int = 0,
    stops: Sequence[int] = (STOP,),
) -> Matcher:
    constraint = OutputConstraint(
        grammar="" if listed is None else "listed",
        starts_after=tuple(starts_after),
        max_tokens_before=max_tokens_before,
    )
    grammar = None if listed is None else ListedGrammar(listed)
    return Matcher(constraint, grammar, stop_token_ids=stops, vocab_size=VOCAB)


def allowed(matcher: Matcher) -> set[int]:
    if not matcher.is_binding:
        return ALL
    words = np.full(num_mask_words(VOCAB), 12345, dtype=np.int32)
    matcher.fill(words)
    return tokens_of(words)


def expected(
    listed: Sequence[tuple[int, ...]] | None, marker: Sequence[int], budget: int, tokens: list[int]
) -> set[int] | None:
    """What may follow, read off the definition; None where the output cannot be so."""
    places = [
        end
        for end in range(len(marker), len(tokens) + 1)
        if tokens[end - len(marker) : end] == list(marker)
    ]
    if marker and not places:
        if budget and len(tokens) >= budget:
            most = min(len(marker) - 1, len(tokens))
            held = next(
                n for n in range(most, -1, -1) if tokens[len(tokens) - n :] == [*marker[:n]]
            )
            return {marker[held]}
        return ALL if listed is None else ALL - {STOP}
    if listed is None:
        return ALL
    rest = tuple(tokens[places[0] if marker else 0 :])
    if not any(output[: len(rest)] == rest for output in listed):
        return None
    return ListedGrammar(listed, rest).following | ({STOP} if rest in listed else set())


@given(
    st.none() | outputs,
    st.lists(few_tokens, max_size=3),
    st.integers(0, 6),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_tokens_that_may_follow_are_those_of_the_definition(
    listed: list[tuple[int, ...]] | None, marker: list[int], budget: int, data: st.DataObject
) -> None:
    budget = budget if marker else 0
    matcher = make(listed, starts_after=marker, max_tokens_before=budget)
    tokens: list[int] = []
    while len(tokens) < 12 and not matcher.is_over:
        may_follow = expected(listed, marker, budget, tokens)
        assert may_follow is not None
        assert allowed(matcher) == may_follow
        few = sorted(may_follow & {0, 1, 2, 3, STOP})
        token = data.draw(st.sampled_from(few))
        tokens.append(token)
        matcher.take(len(tokens) - 1, token)
        assert matcher.error is None
        if token == STOP:
            assert matcher.is_over == (listed is not None)
            return
    if matcher.is_over:
        assert expected(listed, marker, budget, tokens) == {STOP}


@given(outputs, st.lists(few_tokens, max_size=3), st.data())
@settings(max_examples=200, deadline=None)
def test_a_matcher_that_is_told_the_output_anew_is_in_the_same_state(
    listed: list[tuple[int, ...]], marker: list[int], data: st.DataObject
) -> None:
    matcher = make(listed, starts_after=marker, max_tokens_before=3 if marker else 0)
    tokens: list[int] = []
    while len(tokens) < 10 and not matcher.is_over:
        tokens.append(data.draw(st.sampled_from(sorted(allowed(matcher) & {0, 1, 2, 3, STOP}))))
        matcher.follow(tokens)
        anew = make(listed, starts_after=marker, max_tokens_before=3 if marker else 0)
        anew.follow(tokens)
        assert (anew.is_over, anew.is_binding) == (matcher.is_over, matcher.is_binding)
        assert allowed(anew) == allowed(matcher)


def test_a_token_that_was_taken_ahead_is_not_taken_again() -> None:
    matcher = make([(1, 1, 2)])
    matcher.take(0, 1)
    matcher.follow([1])
    matcher.take(0, 1)
    assert allowed(matcher) == {1}


def test_what_nothing_can_follow_is_over_with_its_last_token() -> None:
    matcher = make([(1, 2)], stops=())
    matcher.take(0, 1)
    assert not matcher.is_over
    matcher.take(1, 2)
    assert matcher.is_over
    assert not matcher.is_binding


def test_what_may_go_on_ends_by_a_stop_token_only() -> None:
    matcher = make([(1,), (1, 1)])
    matcher.take(0, 1)
    assert not matcher.is_over
    assert allowed(matcher) == {1, STOP}
    matcher.take(1, STOP)
    assert matcher.is_over


def test_a_stop_token_that_is_text_as_well_only_stops() -> None:
    matcher = make([(1, 2, 3)], stops=(2,))
    matcher.take(0, 1)
    assert allowed(matcher) == set()


def test_a_grammar_that_leaves_no_token_fails_its_request() -> None:
    matcher = make([(1, STOP, 1)])
    matcher.take(0, 1)
    assert allowed(matcher) == set()
    assert isinstance(matcher.error, InvalidRequestError)
    assert not matcher.is_binding


def test_a_token_outside_the_grammar_fails_its_request() -> None:
    matcher = make([(1, 2)])
    matcher.take(0, 3)
    assert isinstance(matcher.error, InternalError)
    assert "output token 3 at index 0" in matcher.error.message


@pytest.mark.parametrize("so_far", [[], [5], [6], [5, 6], [5, 5]])
def test_a_marker_begun_before_the_budget_ends_is_finished_and_not_begun_again(
    so_far: list[int],
) -> None:
    matcher = make(starts_after=(5, 6, 7), max_tokens_before=2)
    tokens = [*so_far, *[8] * (2 - len(so_far))] if so_far != [5] else [8, 5]
    matcher.follow(tokens)
    while matcher.is_binding:
        (token,) = allowed(matcher)
        tokens.append(token)
        matcher.follow(tokens)
    assert tokens[-3:] == [5, 6, 7]
    assert len(tokens) <= 5


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_the_masks_of_a_step_are_those_of_its_rows(first: int, second: int, third: int) -> None:
    """Forced ones, such as wait for a marker, and grammars beside each other."""
    kinds = (
        lambda: make([(1, 2), (3,)]),
        lambda: make([(STOP, 2)], stops=(STOP, 0)),
        lambda: make([(1,)], starts_after=(5, 6)),
        lambda: make([(1,)], starts_after=(5, 6), max_tokens_before=1),
    )
    together = [kinds[kind]() for kind in (first, second, third)]
    alone = [kinds[kind]() for kind in (first, second, third)]
    for matcher in (*together, *alone):
        matcher.follow([1, 1] if matcher._marker else [])
    words = np.full((3, num_mask_words(VOCAB)), 12345, dtype=np.int32)
    fill_masks(together, words)
    for row, matcher in enumerate(alone):
        assert tokens_of(words[row]) == allowed(matcher)
        assert (together[row].error is None) == (matcher.error is None)


def test_tokens_that_were_taken_are_not_walked_again() -> None:
    """A step of a long output costs what one of a short output costs."""

    class Long(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it is walked from its beginning")

    matcher = make([(1, 2, 3)])
    matcher.follow([1, 2])
    matcher.follow(Long([1, 2]))
    matcher.follow(Long([1, 2, 3]))
    assert matcher.is_over
