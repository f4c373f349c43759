"""One call of a generation endpoint: what was asked for, and what is done to its connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from aiohttp import web

from router.backend import Backend
from router.http.access.gate import KeyUse
from router.http.openai.hints import IGNORED_HEADER
from router.http.openai.output_rules import CompiledRules, OutputRules
from router.http.openai.schema import ChatRequest, CompletionRequest
from router.http.openai.unsupported import ignored_fields
from router.model import ModelLimits
from router.requests.admission import BodyBytes
from runtime.config.tiers import RESERVED_NAMES
from runtime.logging import get_logger
from runtime.sampling import SamplingParams
from runtime.tiers import Standing

logger = get_logger(__name__)

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


@dataclass(slots=True, kw_only=True)
class Call(Generic[RequestT]):
    """One call of a generation endpoint, whose body was checked.

    Nobody changes it. It is not frozen because making it would take three times as long.
    """

    request: web.Request
    request_id: str
    body: RequestT
    backend: Backend
    limits: ModelLimits
    """Of its model and workers, when the body was read."""
    sampling: SamplingParams
    rules: OutputRules | None
    """What the output has to follow."""
    standing: Standing
    num_choices: int
    """Of all prompts."""
    use: KeyUse | None
    """What it uses of its key; None: none is asked for."""
    received: float
    held: BodyBytes
    num_bytes: int
    """Of the body."""
    compiled: CompiledRules | None = None
    """``rules`` with their grammars."""

    @property
    def kind(self) -> str:
        """What the response's id begins with."""
        return "chatcmpl" if isinstance(self.body, ChatRequest) else "cmpl"

    @property
    def param(self) -> str:
        """The field with the prompt."""
        return "messages" if isinstance(self.body, ChatRequest) else "prompt"


def headers_of(call: Call[RequestT]) -> dict[str, str]:
    """What the answer says of the request."""
    headers = call.use.headers if call.use is not None else {}
    left_out: list[str] = [] if call.rules is None else call.rules.left_out()
    if not call.standing.tier and call.body.service_tier not in (None, *RESERVED_NAMES):
        left_out = [*left_out, "service_tier"]
    ignored = ignored_fields(call.body, call.backend.model, left_out)
    if not ignored:
        return headers
    logger.debug("ignored fields request_id=%s fields=%s", call.request_id, ignored)
    return {**headers, IGNORED_HEADER: ", ".join(ignored)}


def cut_off_reader(call: Call[RequestT]) -> None:
    """Cut off a client that does not read."""
    cut_off(call, "more output than router.max_mailbox_bytes waits for it")


def cut_off_slow(call: Call[RequestT]) -> None:
    """Cut off a client that reads too slowly."""
    cut_off(call, "it did not take its answer within router.request_timeout_s")


def cut_off(call: Call[RequestT], reason: str) -> None:
    """End the connection of a client that does not read; that cancels its request."""
    logger.warning("a client is cut off request_id=%s reason=%r", call.request_id, reason)
    if call.request.transport is not None:
        call.request.transport.abort()
