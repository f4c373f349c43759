"""Requests to sampling parameters, as properties: every number that leaves is legal."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.http.openai.params import for_choice, for_prompt, sampling_from
from router.http.openai.schema import ChatRequest, CompletionRequest, parse_body
from router.model import ModelLimits

LIMITS = ModelLimits(max_model_len=100, vocab_size=1000, eos_token_ids=(1, 2))


def optional(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | strategy


@given(
    temperature=optional(st.floats(-1, 3)),
    top_p=optional(st.floats(-0.5, 1.5)),
    top_k=optional(st.integers(-3, 50)),
    min_p=optional(st.floats(-0.5, 1.5)),
    repetition_penalty=optional(st.floats(-1, 12)),
    max_tokens=optional(st.integers(-2, 300)),
    min_tokens=optional(st.integers(-2, 20)),
    seed=optional(st.integers(-(2**63), 2**64)),
    ignore_eos=optional(st.booleans()),
    stop_token_ids=optional(st.lists(st.integers(-1, 1001), max_size=4)),
    num_prompt_tokens=st.integers(0, 120),
)
def test_what_passes_is_legal(num_prompt_tokens: int, **fields: object) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", **fields})
    try:
        params = for_prompt(
            sampling_from(request, LIMITS), num_prompt_tokens, LIMITS, param="prompt"
        )
    except RequestError as error:
        refusal = error
    else:
        refusal = None
    if refusal is not None:
        assert refusal.param in {*fields, "prompt"}
        assert "Fix" in refusal.message
        return
    assert 0 <= params.temperature <= 2
    assert 0 < params.top_p <= 1
    assert params.top_k >= 0
    assert 0 <= params.min_p <= 1
    assert params.repetition_penalty > 0
    assert 0 <= params.seed < 2**64
    assert params.max_tokens >= 1
    assert num_prompt_tokens + params.max_tokens <= LIMITS.max_model_len
    assert 0 <= params.min_tokens <= params.max_tokens
    assert all(0 <= token_id < 1000 for token_id in params.stop_token_ids)
    assert set(LIMITS.eos_token_ids) <= set(params.stop_token_ids) or fields["ignore_eos"]


def test_defaults() -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}]})
    params = sampling_from(chat, LIMITS)
    assert (params.temperature, params.top_p, params.num_logprobs) == (1.0, 1.0, -1)
    assert for_prompt(params, 10, LIMITS, param="messages").max_tokens == 90
    assert sampling_from(chat, LIMITS).seed != params.seed
    completion = CompletionRequest.model_validate({"prompt": "x"})
    assert sampling_from(completion, LIMITS).max_tokens == 16


@given(st.integers(0, 2**64 - 1))
def test_choices_have_seeds_of_their_own(seed: int) -> None:
    request = CompletionRequest.model_validate({"prompt": "x", "seed": seed})
    params = sampling_from(request, LIMITS)
    seeds = [for_choice(params, number).seed for number in range(8)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 8
    assert seeds == [for_choice(params, number).seed for number in range(8)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(ChatRequest.model_fields)), json_values))
def test_no_body_breaks_the_parser(fields: dict[str, object]) -> None:
    try:
        body = orjson.dumps(fields)
    except (orjson.JSONEncodeError, TypeError):
        return
    try:
        sampling_from(parse_body(body, ChatRequest), LIMITS)
    except RequestError as error:
        refusal = error
    else:
        return
    assert refusal.message
    assert refusal.status == 400


def test_errors_of_nested_fields_name_them() -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(
            b'{"prompt": "x", "stream_options": {"include_usage": "yes"}}', CompletionRequest
        )
    assert caught.value.param == "stream_options.include_usage"


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest])
def test_a_number_without_a_fraction_is_an_integer(
    request_type: type[ChatRequest | CompletionRequest],
) -> None:
    """Some writers of JSON know one kind of numbers only."""
    needed = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for name in ("n", "max_tokens", "seed", "top_k", "priority"):
        made = parse_body(orjson.dumps({**needed, name: 2.0}), request_type)
        assert (getattr(made, name), type(getattr(made, name))) == (2, int)
        for wrong in (2.5, "2", True):
            with pytest.raises(RequestError, match=f"{name} = .* must be an integer"):
                parse_body(orjson.dumps({**needed, name: wrong}), request_type)
    made = parse_body(orjson.dumps({**needed, "stop_token_ids": [2.0, 3]}), request_type)
    assert made.stop_token_ids == [2, 3]
    with pytest.raises(RequestError, match=r"stop_token_ids\[1\] = 2.5"):
        parse_body(orjson.dumps({**needed, "stop_token_ids": [2, 2.5]}), request_type)
