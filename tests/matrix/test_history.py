"""A made-up history with one thing wrong: the checker names it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix.history import Answer, Choice, problems

TOKENS = [5, 6, 7, 7, 8, 9]


def undisturbed() -> Answer:
    choice = Choice(
        token_ids=list(TOKENS), text="abccde", finish_reason="length", logprobs=[-1.0] * 6
    )
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    return Answer([choice, copy.deepcopy(choice)], usage=usage, is_ended=True)


def cut_after(answer: Answer, count: int) -> None:
    for choice in answer.choices:
        choice.token_ids, choice.text = choice.token_ids[:count], choice.text[:count]
        choice.logprobs, choice.finish_reason = choice.logprobs[:count], None
    answer.usage = {}
    answer.is_ended = False


def test_the_same_is_right() -> None:
    assert problems(undisturbed(), undisturbed()) == []


@given(st.integers(0, 5))
def test_a_beginning_is_a_loss_and_nothing_else(count: int) -> None:
    answer = undisturbed()
    cut_after(answer, count)
    assert problems(answer, undisturbed()) == ["lost: the stream broke off"]
    answer.error, answer.is_ended = {"code": "worker_lost", "message": "decode-0"}, True
    assert problems(answer, undisturbed()) == ["lost: worker_lost: decode-0"]


@given(place=st.integers(0, 5), is_whole=st.booleans(), which=st.integers(0, 1))
def test_a_doubled_a_missing_and_a_wrong_token_are_found(
    place: int, is_whole: bool, which: int
) -> None:
    def double(tokens: list[int]) -> None:
        tokens.insert(place, 4096)

    def drop(tokens: list[int]) -> None:
        del tokens[place]

    def change(tokens: list[int]) -> None:
        tokens[place] += 1000

    for act in (double, drop, change):
        answer = undisturbed()
        act(answer.choices[which].token_ids)
        answer.is_ended = is_whole
        found = [one for one in problems(answer, undisturbed()) if one.startswith("choice")]
        # The last token that is missing is what a cut stream looks like.
        is_beginning = act is drop and place == 5 and not is_whole
        assert bool(found) is not is_beginning
        assert all(one.startswith(f"choice {which}: ") for one in found)


def test_a_token_that_comes_twice_is_found_where_the_next_one_is_the_same() -> None:
    answer = undisturbed()
    answer.choices[0].token_ids.insert(2, 7)  # 5 6 7 7 7 8 9
    assert "token 4 is wrong" in problems(answer, undisturbed())[0]


def edit(name: str, value: object) -> Callable[[Answer], None]:
    return lambda answer: setattr(answer.choices[0], name, value)


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (edit("text", "abXcde"), "does not begin"),
        (edit("text", "abccd"), "text ends after 5 of 6"),
        (edit("calls", "weather{}"), "calls 'weather{}' does not begin"),
        (edit("finish_reason", "stop"), "finish reason stop instead of length"),
        (edit("logprobs", [-1.0] * 5 + [-1.0003]), "3.0e-04 apart"),
        (edit("logprobs", [-1.0] * 5), "logprobs ends after 5 of 6"),
        (edit("logprobs", [-1.0] * 7), "7 log-probabilities instead of 6"),
        (lambda answer: answer.usage.update(completion_tokens=7), "completion_tokens is 7, not 6"),
        (lambda answer: answer.usage.clear(), "prompt_tokens is None, not 4"),
    ],
)
def test_what_else_is_wrong_is_named(act: Callable[[Answer], None], problem: str) -> None:
    answer = undisturbed()
    act(answer)
    assert any(problem in one for one in problems(answer, undisturbed()))


def test_an_error_that_no_fault_may_lead_to_is_told_apart() -> None:
    answer = undisturbed()
    answer.error = {"code": "internal_error", "message": "oh"}
    assert problems(answer, undisturbed()) == [
        "lost: internal_error, which no fault may lead to: oh"
    ]
