"""Grammars that clients wrote, each output followed by a process: masks, lateness, and ends."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from grammar import guard
from grammar.constraints import Constraints
from grammar.guard import CREDIT_CPU_S, GuardedMatcher, settle
from grammar.matcher import Matcher, has_bit, num_mask_words
from runtime.errors import InvalidRequestError, OverloadedError
from runtime.sampling import OutputConstraint, SamplingParams
from tests.grammar.schemas import EOS, MODEL_DIR, VOCAB, serialized
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

HONEST = 'root ::= word (" " word){0,40} "." | "yes"\nword ::= [a-z]+'
NESTED = "root ::= (([a-z]*)*)*"
AMBIGUOUS = 'root ::= root root | [a-z ] | ""'
AT_ONCE = 'root ::= ((([a-z]{0,90}){0,99}){0,99}) "x"'


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(MODEL_DIR, VOCAB)
    yield made
    made.close()


def params_of(ebnf: str, *, is_guarded: bool = True, **constraint: object) -> SamplingParams:
    return SamplingParams(
        stop_token_ids=(EOS,),
        constraint=OutputConstraint(
            grammar=serialized(ebnf),
            is_guarded=is_guarded,
            **constraint,  # type: ignore[arg-type]
        ),
    )


def guarded(constraints: Constraints, ebnf: str, output: list[int] | None = None) -> GuardedMatcher:
    matcher = constraints.begin(params_of(ebnf), output or ()).result()
    assert isinstance(matcher, GuardedMatcher)
    return matcher


def plain(constraints: Constraints, ebnf: str) -> Matcher:
    matcher = constraints.begin(params_of(ebnf, is_guarded=False)).result()
    assert isinstance(matcher, Matcher)
    return matcher


def wait_ready(matcher: GuardedMatcher) -> None:
    wait_until(lambda: matcher.is_ready, "the mask")


def legal_tokens(words: np.ndarray) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def write(matcher: GuardedMatcher, rng: random.Random, most: int) -> list[int]:
    """Random tokens, until it ends or is over."""
    output: list[int] = []
    while len(output) < most and matcher.is_binding:
        output.append(rng.choice(legal_tokens(matcher.words)))
        matcher.take_each(len(output) - 1, output[-1:])
        settle([matcher])
        wait_ready(matcher)
    return output


@pytest.mark.parametrize("seed", range(3))
def test_masks_are_those_of_a_matcher_in_this_process(constraints: Constraints, seed: int) -> None:
    other, local = guarded(constraints, HONEST), plain(constraints, HONEST)
    rng, output = random.Random(seed), list[int]()
    words = np.zeros(num_mask_words(VOCAB), dtype=np.int32)
    while not local.is_over and len(output) < 40:
        local.fill(words)
        assert legal_tokens(other.words) == legal_tokens(words)
        output.append(rng.choice(legal_tokens(words)))
        for matcher in (other, local):
            matcher.follow(output)
        other.settle(time.monotonic() + 60)
        assert other.is_over is local.is_over
        assert other.is_over_after(len(output)) is local.is_over_after(len(output))
    again = guarded(constraints, HONEST, output[:-1])
    local = plain(constraints, HONEST)
    local.follow(output[:-1])
    local.fill(words)
    assert legal_tokens(again.words) == legal_tokens(words)


def test_masks_behind_drafts_are_those_behind_tokens(constraints: Constraints) -> None:
    drafting, telling = guarded(constraints, HONEST), guarded(constraints, HONEST)
    drafts = write(telling, random.Random(5), 3)
    drafting.ask([*drafts, EOS + 1_000_000 % VOCAB])
    drafting.settle(time.monotonic() + 60)
    assert len(drafting.words_behind) == len(drafts)
    assert (drafting.words_behind[-1] == telling.words).all()
    drafting.ask([-1, *drafts])
    drafting.settle(time.monotonic() + 60)
    assert drafting.words_behind == []
    drafting.take_each(0, drafts)
    drafting.settle(time.monotonic() + 60)
    assert (drafting.words == telling.words).all()


def test_a_token_that_cannot_follow_is_said_and_so_is_an_output_that_is_over(
    constraints: Constraints,
) -> None:
    matcher = guarded(constraints, HONEST)
    wrong = next(t for t in range(VOCAB) if not has_bit(matcher.words, t) and t != EOS)
    matcher.take_each(0, [wrong])
    wait_settled(matcher)
    assert matcher.error is not None
    with pytest.raises(InvalidRequestError, match=r"none of constraint\.grammar's"):
        guarded(constraints, HONEST, [wrong])


def wait_settled(matcher: GuardedMatcher) -> None:
    settle([matcher])
    wait_ready(matcher)


@pytest.mark.parametrize("ebnf", [NESTED, AMBIGUOUS, AT_ONCE], ids=["nested", "rules", "at once"])
def test_a_grammar_that_takes_ever_longer_ends_its_request_alone(
    constraints: Constraints, ebnf: str
) -> None:
    honest = guarded(constraints, HONEST)
    with pytest.raises(InvalidRequestError, match="too ambiguous"):
        write_all(constraints, ebnf)
    wait_settled(honest)
    assert honest.error is None
    assert write(honest, random.Random(1), 5)
    assert 0 < honest.cpu_s < CREDIT_CPU_S


def write_all(constraints: Constraints, ebnf: str) -> None:
    matcher = guarded(constraints, ebnf)
    write(matcher, random.Random(0), 3000)
    assert matcher.error is not None
    assert matcher.cpu_s >= CREDIT_CPU_S
    raise matcher.error


def test_a_late_mask_is_not_waited_for(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = guarded(constraints, HONEST)
    monkeypatch.setattr(guard, "WAIT_S", 0.0)
    lates = 0
    for _ in range(50):
        if not matcher.is_binding:
            matcher = guarded(constraints, HONEST)
        matcher.take_each(matcher.num_taken, [legal_tokens(matcher.words)[0]])
        settle([matcher])
        lates += matcher._is_late
        wait_ready(matcher)
    assert lates


def test_what_takes_too_much_to_compile_is_refused_and_the_next_is_compiled(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = "root ::= " + " | ".join(f'"{number:06d}" [a-z]{{0,9}}' for number in range(3000))
    with monkeypatch.context() as patched:
        patched.setattr(guard, "COMPILE_CPU_S", 0.01)
        with pytest.raises(InvalidRequestError, match="to compile"):
            guarded(constraints, huge)
    assert write(guarded(constraints, HONEST), random.Random(2), 3)


def test_a_grammar_that_is_none_is_refused_with_the_reason(constraints: Constraints) -> None:
    params = SamplingParams(constraint=OutputConstraint(grammar="{}", is_guarded=True))
    with pytest.raises(InvalidRequestError, match=r"constraint\.grammar cannot be compiled"):
        constraints.begin(params).result()


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    made = Constraints(tmp_path, VOCAB)
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
        made.begin(params_of(HONEST)).result()
    made.close()


def test_processes_end_with_what_they_follow(constraints: Constraints) -> None:
    matcher = guarded(constraints, HONEST + ' | "first"')  # which waits for its grammar
    process = Path(f"/proc/{matcher._process_id}")
    assert process.exists()
    del matcher
    wait_until(lambda: not process.exists(), "the end of the process")


def test_there_is_room_for_so_many_at_a_time(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = guarded(constraints, HONEST)
    monkeypatch.setattr(guard, "MAX_OUTPUTS", GuardedMatcher._num_live)
    with pytest.raises(OverloadedError, match="try again"):
        guarded(constraints, HONEST)
    del held
    assert guarded(constraints, HONEST)


def test_a_grammar_is_kept_and_a_guard_that_ended_is_started_again() -> None:
    made = Constraints(MODEL_DIR, VOCAB)
    assert write(guarded(made, HONEST), random.Random(0), 2)
    first = made._guard
    assert first is not None
    assert first._process is not None
    first._process.kill()
    first._process.wait()
    matcher = guarded(made, HONEST)  # by the process of the grammar
    parent = int(Path(f"/proc/{matcher._process_id}/stat").read_text().split()[3])
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{parent}").exists(), "the end of the process")
    assert write(matcher, random.Random(0), 2)
    assert write(guarded(made, HONEST), random.Random(0), 2)
    assert write(guarded(made, HONEST + ' | "no"'), random.Random(0), 2)
    made.close()


def test_a_kept_grammar_counts_its_process(constraints: Constraints) -> None:
    before = constraints.num_cached_bytes
    guarded(constraints, 'root ::= "a" | "b"')
    assert constraints.num_cached_bytes - before > guard.PROCESS_BYTES
