"""``/tokenize`` and ``/detokenize`` in vLLM's shapes: which fields, and what they ask for. Pure.

A prompt becomes tokens as in the endpoint that would serve it: a request here is translated into
one of that endpoint.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from router.errors import RequestError
from router.http.openai.fields import Integer
from router.http.openai.params import check_token_ids
from router.http.openai.response import Json
from router.http.openai.schema import ChatRequest, CompletionRequest, validated
from router.model import ModelLimits, ServedModel


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: of a prompt, or of messages. None: the client did not say.

    Fields of the type None are vLLM's and not supported.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # Of messages alone.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    chat_template: None = None
    mm_processor_kwargs: None = None
    media_io_kwargs: None = None


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    model: str | None = None
    tokens: list[Integer]


_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


def as_generation(request: TokenizeRequest) -> ChatRequest | CompletionRequest:
    """The generation request whose prompt ``request`` asks about.

    Raises:
        RequestError: it has neither prompt nor messages, or both, or fields that do not fit them.
    """
    given = {name: value for name, value in request if value is not None}
    if (request.prompt is None) == (request.messages is None):
        found = "neither" if request.prompt is None else "both"
        raise RequestError(
            f"prompt, messages: {found} of them was sent. Fix: send one of them", param="prompt"
        )
    if request.prompt is not None:
        for name in _OF_MESSAGES:
            if name in given:
                raise RequestError(
                    f"{name} is for messages, and this request has a prompt. Fix: leave it out",
                    param=name,
                )
        fields = ("prompt", "add_special_tokens")
        return validated({n: given[n] for n in fields if n in given}, CompletionRequest)
    if request.add_special_tokens:
        raise RequestError(
            "add_special_tokens = True is not supported with messages, whose special tokens the "
            "chat template writes. Fix: leave it out",
            param="add_special_tokens",
            code="unsupported_value",
        )
    return validated({n: given[n] for n in ("messages", *_OF_MESSAGES) if n in given}, ChatRequest)


def tokens_answer(
    token_ids: list[int], model: ServedModel, limits: ModelLimits, *, with_strings: bool
) -> Json:
    """The body of an answer of ``/tokenize``; entries of the vocabulary are told where wanted."""
    entry = model.tokenizer.entry
    return {
        "count": len(token_ids),
        "max_model_len": limits.max_model_len,
        "tokens": token_ids,
        "token_strs": [entry(token_id) or "" for token_id in token_ids] if with_strings else None,
    }


def text_answer(request: DetokenizeRequest, model: ServedModel, limits: ModelLimits) -> Json:
    """The body of an answer of ``/detokenize``: special tokens included.

    Raises:
        RequestError: an id is none of the model's.
    """
    check_token_ids(request.tokens, limits, param="tokens")
    piece = model.tokenizer.vocabulary.token_bytes
    return {"prompt": b"".join(map(piece, request.tokens)).decode(errors="replace")}
