"""How a chat template takes the calls of earlier turns and their results. Found out by rendering.

Templates differ: some want a call's arguments as the JSON text that clients send, some as an object
that they write themselves; for some an answer of calls alone has no content, for others an empty
one. None of them says so, and a wrong guess loses the call or writes it in a way that the model has
never seen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from router.errors import RequestError
from router.text.calls.formats import PROBE_NAME, CallFormat, recognised
from router.text.template import ChatTemplate

_KEY, _VALUE, _RESULT = "probe_of_key", "probe of value", "probe of result"
_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
_CALL_ID = "call0probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    """What one template makes of calls."""

    wants_objects: bool
    """Arguments as objects instead of their JSON text."""
    no_content: str | None
    """The content of a message that has only calls."""
    reads_results: bool
    """Whether it knows messages of the role "tool"."""
    call_format: CallFormat | None
    """How it writes calls; None: in a way unknown here."""


def call_history(template: ChatTemplate) -> CallHistory | None:
    """How ``template`` takes calls; None: it does not."""
    found = None
    empty: tuple[str | None, ...] = (None, "")
    for wants_objects, no_content in itertools.product((False, True), empty):
        rendered = _rendered(template, wants_objects, no_content, with_result=True)
        reads_results = rendered is not None and _RESULT in rendered
        if rendered is None:
            rendered = _rendered(template, wants_objects, no_content, with_result=False)
        if rendered is None or not _holds_call(rendered):
            continue
        history = CallHistory(
            wants_objects=wants_objects,
            no_content=no_content,
            reads_results=reads_results,
            call_format=recognised(rendered),
        )
        if history.call_format is not None:
            return history
        found = found or history
    return found


def _rendered(
    template: ChatTemplate, wants_objects: bool, no_content: str | None, *, with_result: bool
) -> str | None:
    arguments = {_KEY: _VALUE} if wants_objects else _TEXT
    call = {
        "id": _CALL_ID,
        "type": "function",
        "function": {"name": PROBE_NAME, "arguments": arguments},
    }
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": no_content, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": _CALL_ID},
    ]
    try:
        return template.render(messages if with_result else messages[:2])
    except RequestError:
        return None


def _holds_call(rendered: str) -> bool:
    """Whether the call stands there whole, not quoted again, and no ``None`` for the content."""
    parts = (PROBE_NAME, _KEY, _VALUE)
    return all(part in rendered for part in parts) and not (
        f'\\"{_KEY}' in rendered or "None" in rendered
    )
