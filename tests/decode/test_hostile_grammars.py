"""Grammars whose masks are late, or never come, beside others: a real engine, real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.generate import GenerateOutput, generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import ScheduledRequest
from engine.sampling import step_masks
from grammar import guard
from grammar.constraints import Constraints
from runtime.errors import ErrorCode
from runtime.sampling import FinishReason, OutputConstraint, SamplingParams
from tests.decode.test_constrained_text import (
    GUARDED,
    PARAMS,
    PROMPT,
    Pair,
    constraints,
    model,
    whole,
)
from tests.grammar.schemas import serialized

__all__ = ["constraints", "model", "whole"]

HOSTILE = {
    "nested stars": "root ::= (([a-z]*)*)*",
    "counts of counts": "root ::= ([a-z]{0,50}){0,50}",
    "rules": 'root ::= root root | [a-z ] | ""',
    "at once": 'root ::= [a-z ]+ ((([a-z]{0,90}){0,99}){0,99}) "x"',
}
FREE = SamplingParams(temperature=1.0, seed=77, max_tokens=40)


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("ahead", [False, True], ids=["one-by-one", "ahead"])
def test_late_masks_change_no_token(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    monkeypatch: pytest.MonkeyPatch,
    *,
    graphs: bool,
    ahead: bool,
) -> None:
    """A row that samples nothing in a step is sampled in a later one as if it had never left."""
    monkeypatch.setattr(guard, "WAIT_S", 0.0)
    (alone,) = generate(model, [PROMPT], FREE)
    pair = Pair(model, constraints, graphs=graphs, ahead=ahead)
    late, free = pair.begin(PARAMS["guarded"], []), pair.begin(FREE, [])
    first = pair.first
    penalised = pair.begin(replace(PARAMS["everything"], constraint=GUARDED), [])
    pair.finish()
    assert pair.tokens(late) == whole["guarded"].token_ids[1:]
    assert [first, *pair.tokens(free)] == alone.token_ids
    assert pair.tokens(penalised) == whole["everything"].token_ids[1:]
    assert pair.reason(late) is FinishReason.COMPLETE


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_masks_that_take_turns_change_no_token(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    monkeypatch: pytest.MonkeyPatch,
    *,
    graphs: bool,
) -> None:
    """Every mask counts as one that takes long, and a step has time for one of them."""
    monkeypatch.setattr(step_masks, "QUICK_S", -1.0)
    monkeypatch.setattr(step_masks, "BUDGET_S", 0.0)
    lost, lose = list[str](), ScheduledRequest.lose

    def note(item: ScheduledRequest) -> None:
        lost.append(item.request.request_id)
        lose(item)

    monkeypatch.setattr(ScheduledRequest, "lose", note)
    pair = Pair(model, constraints, graphs=graphs, ahead=True)
    requests = {name: pair.begin(PARAMS[name], []) for name in ("greedy", "everything")}
    pair.finish()
    assert set(lost) == {request.request_id for request in requests.values()}
    for name, request in requests.items():
        assert pair.tokens(request) == whole[name].token_ids[1:]


@pytest.mark.parametrize(
    "name",
    # Where masks grow slowly it is minutes until one is late.
    [pytest.param(n, marks=() if n == "at once" else pytest.mark.nightly) for n in HOSTILE],
)
@pytest.mark.timeout(900)
def test_a_hostile_grammar_ends_its_request_and_no_other(
    model: DeepseekV3ForCausalLM,
    constraints: Constraints,
    whole: dict[str, GenerateOutput],
    name: str,
) -> None:
    (alone,) = generate(model, [PROMPT], FREE)
    pair = Pair(model, constraints, graphs=True, ahead=True)
    constraint = OutputConstraint(grammar=serialized(HOSTILE[name]), is_guarded=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=180, constraint=constraint)
    hostile = pair.begin(params, [])
    honest, free = pair.begin(PARAMS["guarded"], []), pair.begin(FREE, [])
    first = pair.first
    pair.finish()
    assert pair.tokens(honest) == whole["guarded"].token_ids[1:]
    assert [first, *pair.tokens(free)] == alone.token_ids
    end = pair.deltas[hostile.request_id][-1]
    if end.error is None:  # its model may end it, or 180 tokens may, before the masks are too late
        assert end.finish_reason in (FinishReason.COMPLETE, FinishReason.LENGTH)
    else:
        assert end.error.code is ErrorCode.INVALID_REQUEST
        assert "too ambiguous" in end.error.message
