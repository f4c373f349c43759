"""``/generate`` in SGLang's shape: from its body to a completion, and its answers. Pure.

What is asked for is translated into a request of ``/v1/completions``, which is then served like any
other; ``names_of`` says under which name a client knows each field of that.
"""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import BaseModel, ConfigDict

from router.errors import RequestError
from router.http.apis.generate_logprobs import ChoiceLogprobs
from router.http.openai.fields import Integer, neutral
from router.http.openai.response import Choice, Json, ResponseInfo
from router.http.openai.schema import CompletionRequest, validated
from router.http.wire.sse import event
from router.text.output import Piece
from runtime.pb import prefill_pb2

MAX_NEW_TOKENS = 128
"""SGLang's default."""
_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("logit_bias", "ignore_eos", "skip_special_tokens", "json_schema", "regex", "ebnf"),
        )
    },
}
"""Fields of a completion by their names among the sampling parameters."""


_Unsupported = Annotated[None, neutral(False, 0, -1, "", [], {})]


class SamplingFields(BaseModel):
    """``sampling_params``; ranges are checked in the completion that it becomes."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_new_tokens: Integer | None = None
    min_new_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Integer | None = None
    min_p: float | None = None
    n: Integer | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Integer] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Integer | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    spaces_between_special_tokens: bool | None = None  # of no effect on a byte-level vocabulary
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: _Unsupported = None
    stop_regex: _Unsupported = None
    custom_params: _Unsupported = None
    stream_interval: _Unsupported = None


class GenerateRequest(BaseModel):
    """``POST /generate``."""

    model_config = ConfigDict(strict=True, extra="forbid")

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: SamplingFields | None = None
    stream: bool | None = None
    rid: str | None = None
    extra_key: str | None = None
    """Requests share cached prefixes with those of the same key."""
    return_logprob: bool | None = None
    logprob_start_len: Integer | None = None
    """The prompt's token with which log-probabilities begin; -1: those of the output alone."""
    top_logprobs_num: Integer | None = None
    return_text_in_logprobs: bool | None = None
    # Harmless: they change no answer here.
    log_metrics: bool | None = None
    priority: Integer | None = None
    token_ids_logprob: _Unsupported = None
    return_hidden_states: _Unsupported = None
    return_routed_experts: _Unsupported = None
    input_embeds: _Unsupported = None
    image_data: _Unsupported = None
    video_data: _Unsupported = None
    audio_data: _Unsupported = None
    modalities: _Unsupported = None
    lora_path: _Unsupported = None
    session_params: _Unsupported = None
    custom_logit_processor: _Unsupported = None

    @property
    def is_list(self) -> bool:
        """Whether the answer is a list: of several prompts or choices, or of a list of one."""
        is_batch = bool(self.input_ids) and isinstance(self.input_ids[0], list)  # type: ignore[index]
        n = self.sampling_params.n if self.sampling_params is not None else None
        return isinstance(self.text, list) or is_batch or (n or 1) > 1


def names_of(request: GenerateRequest) -> dict[str, str]:
    """Where the client finds the fields of the completion that ``request`` becomes."""
    prompt = "input_ids" if request.text is None else "text"
    sampling = {ours: f"sampling_params.{theirs}" for ours, theirs in _SAMPLING.items()}
    names = {"prompt": prompt, "cache_salt": "extra_key", "logprobs": "top_logprobs_num"}
    return {**names, **sampling}


def as_completion(request: GenerateRequest) -> CompletionRequest:
    """The same as a request of ``/v1/completions``.

    Raises:
        RequestError: it has neither text nor input_ids, or both; the field is named as there.
    """
    if (request.text is None) == (request.input_ids is None):
        found = "neither" if request.text is None else "both"
        raise RequestError(
            f"text, input_ids: {found} of them was sent. Fix: send one of them", param="text"
        )
    sampling = request.sampling_params or SamplingFields()
    given = {ours: getattr(sampling, theirs) for ours, theirs in _SAMPLING.items()}
    fields: dict[str, object] = {
        "max_tokens": MAX_NEW_TOKENS,
        **{name: value for name, value in given.items() if value is not None},
        "prompt": request.input_ids if request.text is None else request.text,
        "stream": request.stream,
        "cache_salt": request.extra_key,
        "priority": request.priority,
        "return_token_ids": True,
    }
    if request.return_logprob:
        fields["logprobs"] = request.top_logprobs_num or 0
        fields["echo"] = _prompt_start(request) is not None
    return validated(fields, CompletionRequest)


def _prompt_start(request: GenerateRequest) -> int | None:
    """From which of the prompt's tokens log-probabilities are wanted; None: of none.

    Raises:
        RequestError: ``logprob_start_len`` is below -1.
    """
    start = request.logprob_start_len
    if start is not None and start < -1:
        raise RequestError(
            f"logprob_start_len = {start} is out of range. Fix: send -1, or a token's number",
            param="logprob_start_len",
        )
    return None if start is None or start == -1 or not request.return_logprob else start


class GenerateText:
    """The growing answers of all choices; every event has the whole text so far."""

    def __init__(self, info: ResponseInfo, request: GenerateRequest) -> None:
        self._info = info
        self._id = request.rid or info.response_id.removeprefix("cmpl-")
        self._texts = [""] * len(info.choices)
        self._ids: list[list[int]] = [[] for _ in info.choices]
        self._prompt_start = _prompt_start(request)
        self._logprobs = [
            ChoiceLogprobs(
                info.vocabulary,
                num_tops=request.top_logprobs_num or 0,
                with_text=bool(request.return_text_in_logprobs),
            )
            for _ in (info.choices if request.return_logprob else ())
        ]
        self.is_list = request.is_list

    def open(self, choice: Choice, first: prefill_pb2.FirstToken) -> None:
        """What is known of a choice with its first token."""
        if self._prompt_start is not None:
            self._logprobs[choice.index].add_prompt(
                choice.prompt.token_ids, first.prompt_logprobs, self._prompt_start
            )

    def add(self, choice: Choice, piece: Piece) -> None:
        """News of a choice."""
        if self._logprobs:
            self._logprobs[choice.index].add(piece.token_ids, piece.logprobs)
        self._texts[choice.index] += piece.text
        self._ids[choice.index] += piece.token_ids

    def answer(self, choice: Choice, finish_reason: str | None) -> Json:
        """What is known of one choice; its tokens only at its end."""
        timings = choice.generation.timings
        meta: Json = {
            "id": self._id if len(self._texts) == 1 else f"{self._id}.{choice.index}",
            "finish_reason": _finish(choice, finish_reason),
            "prompt_tokens": len(choice.prompt.token_ids),
            "completion_tokens": choice.text.num_tokens,
            "cached_tokens": choice.generation.num_cached_tokens,
        }
        if self._logprobs:
            meta |= self._logprobs[choice.index].meta()
        payload: Json = {"text": self._texts[choice.index], "meta_info": meta}
        if finish_reason is not None:
            payload["output_ids"] = self._ids[choice.index]
            meta["e2e_latency"] = round(timings.last_token - timings.received, 6)
            meta |= _drafts(choice)
        return payload


def _drafts(choice: Choice) -> Json:
    """What became of a choice's drafts; nothing where no step had any."""
    drafts = choice.generation.drafts
    if not drafts.num_verifications:
        return {}
    return {
        "spec_verify_ct": drafts.num_verifications,
        "spec_draft_token_num": drafts.num_verified,
        "spec_accept_token_num": drafts.num_accepted,
        "spec_accept_length": round(drafts.accept_length, 4),
    }


def _finish(choice: Choice, finish_reason: str | None) -> Json | None:
    """Why a choice ended, and what matched: a stop string, or the id of a stop token."""
    if finish_reason is None:
        return None
    if finish_reason == "length":
        return {"type": "length", "length": choice.text.num_tokens}
    matched = choice.text.stopped_by
    last = choice.generation.output_token_ids[-1]
    return {"type": "stop", "matched": last if matched is None else matched}


class GenerateStream:
    """A ``ResponseFormat`` of server-sent events, one for each piece of text."""

    def __init__(self, text: GenerateText) -> None:
        self._text = text

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing: the first text says all."""
        self._text.open(choice, first)
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """The text so far."""
        self._text.add(choice, piece)
        payload = self._text.answer(choice, piece.finish_reason)
        return event({"index": choice.index, **payload} if self._text.is_list else payload)

    def closing(self) -> bytes:
        """Nothing more."""
        return b""


class GenerateBody:
    """A ``ResponseFormat`` of one JSON body."""

    def __init__(self, info: ResponseInfo, text: GenerateText) -> None:
        self._info = info
        self._text = text
        self._reasons: dict[int, str | None] = {}

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """Nothing yet."""
        self._text.open(choice, first)
        return b""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """Nothing yet."""
        self._text.add(choice, piece)
        self._reasons[choice.index] = piece.finish_reason
        return b""

    def closing(self) -> bytes:
        """One answer, or a list of them."""
        answers = [self._text.answer(c, self._reasons[c.index]) for c in self._info.choices]
        return orjson.dumps(answers if self._text.is_list else answers[0])
