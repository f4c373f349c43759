"""What chat and completion answers have in common: the choices, usage, timings.

A ``ResponseFormat`` is told of each choice's opening and pieces and gives the bytes to send: events
in a stream, nothing until the closing in a plain answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import orjson

from router.http.access.routing_headers import ROUTING_HEADER
from router.http.wire.sse import TextEvent, event
from router.requests.drafts import DraftCounts
from router.requests.generation import Generation
from router.text.output import ChoiceText, Piece
from router.text.reasoning import Start
from router.text.tokenizer import Vocabulary
from runtime.pb import prefill_pb2

Json = dict[str, object]


@dataclass(slots=True, kw_only=True)
class Prompt:
    """One prompt of a request; nobody changes it."""

    token_ids: list[int]
    text: str | None = None
    """As the client sent it; None where it sent ids."""
    start: Start = Start.CLOSED
    """Where the output begins for its reader: as answer, unless the template says otherwise."""
    model_start: Start = Start.CLOSED
    """The same for the model, whether or not the client wants its reasoning apart."""


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice of an answer."""

    index: int
    prompt: Prompt
    generation: Generation
    text: ChoiceText


@dataclass(slots=True, kw_only=True)
class ResponseInfo:
    """What every chunk and body of one answer repeats, and what the client asked to be told."""

    response_id: str
    created: int
    model: str
    vocabulary: Vocabulary
    includes_usage: bool = False
    continuous_usage: bool = False
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    wants_prompt_logprobs: bool = False
    """Apart from those of ``echo``."""
    wants_timings: bool = False
    wants_routing: bool = False
    service_tier: str = ""
    """Of the request; empty: there are no tiers."""
    choices_per_prompt: int = 1
    choices: list[Choice] = field(default_factory=list)

    def head(self, kind: str) -> Json:
        """The fields with which every chunk and body begins."""
        head: Json = {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
        return {**head, "service_tier": self.service_tier} if self.service_tier else head

    def chunk(self, kind: str, choice: Json) -> Json:
        """A streamed chunk with one choice; usage, if asked for, is null before the last."""
        payload: Json = {**self.head(kind), "choices": [choice]}
        if self.includes_usage:
            payload["usage"] = self.usage() if self.continuous_usage else None
        return payload

    def body(self, kind: str, choices: list[Json]) -> Json:
        """A whole answer."""
        payload: Json = {**self.head(kind), "choices": choices, "usage": self.usage()}
        if self.wants_timings:
            payload["timings"] = self.timings()
        return payload

    def usage(self) -> Json:
        """Tokens so far; a prompt counts once however many choices it has."""
        firsts = self.choices[:: self.choices_per_prompt]
        prompt_tokens = sum(len(choice.prompt.token_ids) for choice in firsts)
        completion_tokens = sum(choice.text.num_tokens for choice in self.choices)
        drafts = self.drafts()
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(choice.generation.num_cached_tokens for choice in firsts)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": drafts.num_accepted,
                "reasoning_tokens": sum(
                    choice.text.num_reasoning_tokens for choice in self.choices
                ),
                "rejected_prediction_tokens": drafts.num_rejected,
            },
        }

    def drafts(self) -> DraftCounts:
        """Of all choices so far."""
        counts = DraftCounts()
        for choice in self.choices:
            counts += choice.generation.drafts
        return counts

    def routing(self) -> Mapping[str, str]:
        """A header that says why the first choice has its pair, where asked for and known."""
        why = self.choices[0].generation.why
        if not self.wants_routing or why is None:
            return {}
        return {ROUTING_HEADER: orjson.dumps(why).decode()}

    def timings(self) -> dict[str, float]:
        """Seconds by stage, of the first choice; with drafts what a step gave it."""
        generation = self.choices[0].generation
        drafts, split = generation.drafts, generation.timings.told()
        if not drafts.num_verifications:
            return split
        return {**split, "accept_length": round(drafts.accept_length, 4)}

    @property
    def plain_text_only(self) -> bool:
        """Whether chunks differ in their text alone and can be rendered from a template."""
        return not (self.wants_logprobs or self.wants_token_ids or self.continuous_usage)


class ResponseFormat(Protocol):
    """Bytes of one answer, in order."""

    def opening(self, choice: Choice, first: prefill_pb2.FirstToken) -> bytes:
        """With a choice's first token, before its first piece."""

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """News of a choice."""

    def closing(self) -> bytes:
        """After the last piece of the last choice."""


@runtime_checkable
class TextEvents(Protocol):
    """A ``ResponseFormat`` of a stream whose pieces of text alone differ in that text alone."""

    def text_event(self, choice: Choice) -> TextEvent | None:
        """What such a piece of ``choice`` becomes; None where the client wants to know more."""


def sum_texts(pieces: Sequence[Piece]) -> str:
    """The whole text of a choice."""
    return "".join(piece.text for piece in pieces)


def closing_event(info: ResponseInfo, kind: str) -> bytes:
    """The last chunk of a stream of ``kind``: usage and timings, where asked for."""
    if not (info.includes_usage or info.wants_timings):
        return b""
    last: dict[str, object] = {**info.head(kind), "choices": []}
    if info.includes_usage:
        last["usage"] = info.usage()
    if info.wants_timings:
        last["timings"] = info.timings()
    return event(last)
