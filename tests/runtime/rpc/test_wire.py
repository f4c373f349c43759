"""Errors, sampling parameters and states across the wire and through the transition tables."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ERRORS_BY_CODE, ErrorCode, InternalError, TandemError
from runtime.pb import common_pb2, prefill_pb2
from runtime.rpc.wire import (
    error_from_proto,
    error_to_proto,
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    standing_from_proto,
    standing_to_proto,
)
from runtime.sampling import (
    FinishReason,
    OutputConstraint,
    PositionLogprobs,
    SamplingParams,
    finish_reason_after,
)
from runtime.tiers import NO_TIER, Standing
from worker.lifecycle import (
    DECODE_TRANSITIONS,
    PREFILL_TRANSITIONS,
    DecodeStatus,
    PrefillStatus,
    check_transition,
)

f32 = st.floats(-100, 100, width=32)
constraints = st.builds(
    OutputConstraint,
    grammar=st.text(max_size=20),
    starts_after=st.lists(st.integers(0, 5000), max_size=3).map(tuple),
    max_tokens_before=st.integers(0, 100),
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32),
    top_k=st.integers(0, 1000),
    min_p=st.floats(0, 1, width=32),
    repetition_penalty=st.floats(0.5, 2, width=32),
    presence_penalty=f32,
    frequency_penalty=f32,
    logit_bias=st.dictionaries(st.integers(0, 5000), f32, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 4096),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.lists(st.integers(0, 5000), max_size=3).map(tuple),
    num_logprobs=st.integers(-1, 20),
    num_prompt_logprobs=st.integers(-1, 20),
    constraint=st.none() | constraints,
)


@given(params)
def test_sampling_params_round_trip(value: SamplingParams) -> None:
    assert sampling_from_proto(sampling_to_proto(value)) == value


@given(f32, st.lists(st.tuples(st.integers(0, 5000), f32), max_size=5))
def test_logprobs_round_trip(logprob: float, top: list[tuple[int, float]]) -> None:
    value = PositionLogprobs(logprob, tuple(i for i, _ in top), tuple(p for _, p in top), len(top))
    assert logprobs_from_proto(logprobs_to_proto(value)) == value


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_keeps_its_type(code: ErrorCode) -> None:
    error = ERRORS_BY_CODE[code]("why", request_id="r1")
    back = error_from_proto(error_to_proto(error))
    assert (type(back), back.message, back.request_id) == (type(error), "why", "r1")
    assert common_pb2.ErrorCode.Name(int(code)) == f"ERROR_CODE_{code.name}"


@pytest.mark.parametrize("is_suspect", [False, True])
def test_an_error_says_whether_its_request_may_be_why(is_suspect: bool) -> None:
    error = InternalError("why", suspect=is_suspect)
    assert error_from_proto(error_to_proto(error)).suspect is is_suspect


def test_an_error_that_is_passed_on_keeps_the_name_of_who_said_it() -> None:
    own = error_to_proto(InternalError("why"))
    assert error_from_proto(own).relayed_from == ""
    relayed = error_from_proto(own, relayed_from="decode-0/1")
    assert relayed.relayed_from == "decode-0/1"
    again = error_from_proto(error_to_proto(relayed), relayed_from="prefill-0/0")
    assert again.relayed_from == "decode-0/1"


def test_every_error_class_has_its_code() -> None:
    assert set(ERRORS_BY_CODE) == set(ErrorCode)
    assert set(ERRORS_BY_CODE.values()) == set(TandemError.__subclasses__())


def test_a_foreign_error_is_internal_and_named() -> None:
    back = error_from_proto(error_to_proto(KeyError("x"), "r2"))
    assert isinstance(back, InternalError)
    assert "KeyError" in back.message
    assert back.request_id == "r2"


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_round_trip(reason: FinishReason | None) -> None:
    assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason


def test_an_unknown_finish_reason_is_internal() -> None:
    with pytest.raises(InternalError, match="finish_reason = 99 is unknown"):
        finish_reason_from_proto(cast(common_pb2.FinishReason, 99))


def test_only_the_tables_moves_are_legal() -> None:
    for old in PrefillStatus:
        for new in PrefillStatus:
            if new in PREFILL_TRANSITIONS[old]:
                check_transition(old, new, "r")
            else:
                with pytest.raises(InternalError, match="illegal"):
                    check_transition(old, new, "r")
    assert set(DECODE_TRANSITIONS) == set(DecodeStatus)
    with pytest.raises(InternalError, match="finished -> running"):
        check_transition(DecodeStatus.FINISHED, DecodeStatus.RUNNING, "r")


def test_every_state_can_end() -> None:
    for table in (PREFILL_TRANSITIONS, DECODE_TRANSITIONS):
        reaches_end = {state for state, nexts in table.items() if not nexts}
        assert len(reaches_end) == 1
        for _ in table:
            reaches_end |= {state for state, nexts in table.items() if nexts & reaches_end}
        assert reaches_end == set(table)


def test_finish_reason_after_a_token() -> None:
    value = SamplingParams(max_tokens=3, min_tokens=1, stop_token_ids=(7,))

    def after(token: int, outputs: int, total: int = 10) -> FinishReason | None:
        return finish_reason_after(
            token, num_output_tokens=outputs, num_tokens=total, params=value, max_model_len=64
        )

    assert after(5, 1) is None
    assert after(7, 1) is None  # min_tokens not passed yet
    assert after(7, 2) is FinishReason.STOP
    assert after(5, 3) is FinishReason.LENGTH
    assert after(5, 1, 64) is FinishReason.LENGTH


standings = st.builds(
    Standing,
    tier=st.text(max_size=10),
    order=st.integers(0, 1000),
    priority=st.integers(-1000, 1000),
    share=st.floats(0, 1),
    ttft_s=st.floats(0, 100),
    tpot_s=st.floats(0, 1),
)


@given(standings)
def test_a_standing_survives_the_wire(standing: Standing) -> None:
    request = prefill_pb2.RunRequest(standing=standing_to_proto(standing))
    assert (
        standing_from_proto(prefill_pb2.RunRequest.FromString(request.SerializeToString()).standing)
        == standing
    )
    assert prefill_pb2.RunRequest(standing=standing_to_proto(NO_TIER)) == prefill_pb2.RunRequest()
