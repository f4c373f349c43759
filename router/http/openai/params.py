"""From a request to SamplingParams: defaults, ranges, context length, seeds.

After this module every number is legal and every default is filled in: workers apply none.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace

from router.errors import RequestError
from router.http.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from router.model import ModelLimits
from runtime.sampling import MAX_PROMPT_LOGPROBS, SamplingParams, num_prompt_values

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 20
BYTES_PER_TOKEN = 4
COMPLETION_MAX_TOKENS = 16
_SEEDS = 2**64


def sampling_from(request: GenerationRequest, limits: ModelLimits) -> SamplingParams:
    """The sampling of ``request``; ``max_tokens`` is still uncapped (``for_prompt`` does it).

    Raises:
        RequestError: a value is out of range.
    """
    max_tokens = _max_tokens(request, limits)
    min_tokens = _integer("min_tokens", request.min_tokens, 0, 0, max_tokens)
    num_logprobs, num_prompt_logprobs = _logprobs(request)
    _check_stops(request.stop)
    top_k = _integer("top_k", request.top_k, 0, -1, 2**31 - 1)
    seed = request.seed
    return SamplingParams(
        temperature=_number("temperature", request.temperature, 1.0, 0.0, 2.0),
        top_p=_number("top_p", request.top_p, 1.0, 0.0, 1.0, exclusive=True),
        top_k=max(top_k, 0),
        min_p=_number("min_p", request.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_number(
            "repetition_penalty", request.repetition_penalty, 1.0, 0.0, 10.0, exclusive=True
        ),
        presence_penalty=_number("presence_penalty", request.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", request.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(request.logit_bias, limits),
        seed=int.from_bytes(os.urandom(8), "little") if seed is None else seed % _SEEDS,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(request, limits),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def choices_per_prompt(request: GenerationRequest) -> int:
    """``n``, checked."""
    return _integer("n", request.n, 1, 1, MAX_CHOICES)


def num_choices(request: GenerationRequest, num_prompts: int, most: int) -> int:
    """Of all prompts together.

    Raises:
        RequestError: more than ``most``.
    """
    n = choices_per_prompt(request)
    if num_prompts * n > most:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} are {num_prompts * n} choices, and "
            f"router.max_choices_per_request is {most}. Fix: send fewer at once",
            param="n" if num_prompts == 1 else "prompt",
        )
    return num_prompts * n


def for_prompt(
    params: SamplingParams, num_prompt_tokens: int, limits: ModelLimits, *, param: str
) -> SamplingParams:
    """``params`` with max_tokens capped by the room that the prompt leaves.

    Raises:
        RequestError: the prompt is empty, or leaves no room; ``param`` is the field that holds it.
    """
    if num_prompt_tokens == 0:
        raise RequestError(f"{param} is empty. Fix: send at least one token of text", param=param)
    room = limits.max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(param, num_prompt_tokens, limits)
    if params.max_tokens <= room:  # min_tokens is no more
        return params
    max_tokens = room
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))


def too_long(
    param: str, num_tokens: int, limits: ModelLimits, *, at_least: bool = False
) -> RequestError:
    """A prompt in the field ``param`` leaves no room for a token of output."""
    number = f"at least {num_tokens}" if at_least else f"{num_tokens}"
    return RequestError(
        f"{param} has {number} tokens, but the model's context holds "
        f"{limits.max_model_len} for prompt and output together. "
        f"Fix: shorten it to at most {limits.max_model_len - 1} tokens",
        param=param,
        code="context_length_exceeded",
    )


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The sampling of one of a prompt's n choices: choice 0 has the request's own seed."""
    if choice == 0:
        return params
    digest = hashlib.blake2b(
        params.seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8
    ).digest()
    return replace(params, seed=int.from_bytes(digest, "little"))


def check_token_ids(ids: Sequence[int], limits: ModelLimits, *, param: str) -> None:
    """Raise RequestError unless all ``ids`` are of the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        bad = next(i for i in ids if not 0 <= i < limits.vocab_size)
        raise RequestError(
            f"{param} holds the token id {bad}, which the model does not have. "
            f"Fix: send ids from 0 to {limits.vocab_size - 1}",
            param=param,
        )


def tokens_asked_for(
    request: GenerationRequest, num_bytes: int, num_choices: int
) -> tuple[int, int]:
    """What a limit of tokens takes ``request`` for: tokens, and choices of any length beside them.

    The most output that it asks for, if it says so, and a token of prompt for every four of the
    ``num_bytes`` of its body, as prompts are counted only when it has been let in.
    """
    asked = request.max_tokens
    if isinstance(request, ChatRequest):
        asked = asked if request.max_completion_tokens is None else request.max_completion_tokens
    elif asked is None:
        asked = COMPLETION_MAX_TOKENS
    num_prompt = num_bytes // BYTES_PER_TOKEN
    return (num_prompt, num_choices) if asked is None else (num_prompt + num_choices * asked, 0)


def _max_tokens(request: GenerationRequest, limits: ModelLimits) -> int:
    top = 2**31 - 1
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            return _integer("max_completion_tokens", request.max_completion_tokens, 0, 1, top)
        return _integer("max_tokens", request.max_tokens, limits.max_model_len, 1, top)
    return _integer("max_tokens", request.max_tokens, COMPLETION_MAX_TOKENS, 1, top)


def check_prompt_logprobs(request: GenerationRequest, num_tokens: Sequence[int]) -> None:
    """Bound the log-probabilities of the prompts, which come at once and stay until they are sent.

    Args:
        request: checked.
        num_tokens: of each of its prompts.

    Raises:
        RequestError: all choices together have more than MAX_PROMPT_LOGPROBS.
    """
    _, num_top = _logprobs(request)
    number = choices_per_prompt(request) * num_prompt_values(sum(num_tokens), num_top)
    if number > MAX_PROMPT_LOGPROBS:
        param = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        raise RequestError(
            f"{param} = {num_top} for {sum(num_tokens)} tokens of prompt and n = "
            f"{choices_per_prompt(request)} is {number} log-probabilities of prompts, and a "
            f"request may have {MAX_PROMPT_LOGPROBS}. Fix: ask for fewer at each token, or send "
            "less at once",
            param=param,
        )


def _logprobs(request: GenerationRequest) -> tuple[int, int]:
    """(num_logprobs, num_prompt_logprobs), -1 where none are wanted."""
    of_prompt = _integer("prompt_logprobs", request.prompt_logprobs, -1, 0, MAX_LOGPROBS)
    if of_prompt >= 0 and request.stream:
        raise RequestError(
            f"prompt_logprobs = {of_prompt} is not told in streams. Fix: send stream: false, or "
            "leave it out",
            param="prompt_logprobs",
        )
    if isinstance(request, ChatRequest):
        if request.top_logprobs and not request.logprobs:
            raise RequestError(
                f"top_logprobs = {request.top_logprobs} needs logprobs. Fix: send logprobs: true",
                param="top_logprobs",
            )
        count = _integer("top_logprobs", request.top_logprobs, 0, 0, MAX_LOGPROBS)
        return (count if request.logprobs else -1), of_prompt
    assert isinstance(request, CompletionRequest)
    if request.logprobs is None:
        return -1, of_prompt
    count = _integer("logprobs", request.logprobs, 0, 0, MAX_LOGPROBS)
    return count, (count if request.echo and of_prompt < 0 else of_prompt)


def _stop_token_ids(request: GenerationRequest, limits: ModelLimits) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    check_token_ids(ids, limits, param="stop_token_ids")
    eos = () if request.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*eos, *ids)))


def _logit_bias(bias: dict[int, float], limits: ModelLimits) -> dict[int, float]:
    check_token_ids(list(bias), limits, param="logit_bias")
    for token_id, value in bias.items():
        _number(f"logit_bias[{token_id}]", value, 0.0, -100.0, 100.0)
    return bias


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(
            f"stop has {len(stops)} strings. Fix: send at most {MAX_STOPS}", param="stop"
        )
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop holds a string of {len(stop)} characters. "
                f"Fix: send strings of 1 to {MAX_STOP_CHARS} characters",
                param="stop",
            )


def _integer(name: str, value: int | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise RequestError(
            f"{name} = {value} is out of range. Fix: send an integer from {least} to {most}",
            param=name,
        )
    return value


def _number(
    name: str,
    value: float | None,
    default: float,
    least: float,
    most: float,
    *,
    exclusive: bool = False,
) -> float:
    """``exclusive``: the least value itself is out of range."""
    if value is None:
        return default
    if not math.isfinite(value) or not least <= value <= most or (exclusive and value == least):
        wanted = (
            f"above {least:g} and at most {most:g}" if exclusive else f"from {least:g} to {most:g}"
        )
        raise RequestError(
            f"{name} = {value:g} is out of range. Fix: send a number {wanted}", param=name
        )
    return float(value)
