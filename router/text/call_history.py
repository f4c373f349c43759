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
_CALL_IDS = ("callprobe", f"functions.{PROBE_NAME}:0")
"""Some templates take ids of nine letters alone; some write a call's name in its id only."""
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_of_tools",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    """What one template makes of calls."""

    wants_objects: bool
    """Arguments as objects instead of their JSON text."""
    no_content: str | None
    """The content of a message that has only calls."""
    takes_both: bool
    """Whether a call is written also where there is content; else it is one or the other."""
    reads_results: bool
    """Whether it knows messages of the role "tool"."""
    call_format: CallFormat | None
    """How it writes calls; None: in a way unknown here."""


def call_history(template: ChatTemplate) -> CallHistory | None:
    """How ``template`` takes calls; None: it does not."""
    found = []
    empty: tuple[str | None, ...] = (None, "")
    for call_id, wants_objects, no_content in itertools.product(_CALL_IDS, (False, True), empty):
        probe = _Probe(template, call_id, wants_objects)
        for reads_results in (True, False):
            rendered = probe.rendered(no_content, with_result=reads_results)
            if rendered is None or not _holds_call(rendered):
                continue
            if reads_results and _RESULT not in rendered:
                continue
            history = CallHistory(
                wants_objects=wants_objects,
                no_content=no_content,
                takes_both=probe.takes_both(with_result=reads_results),
                reads_results=reads_results,
                call_format=recognised(rendered),
            )
            found.append(history)
            break
    return max(found, key=_worth, default=None)  # of equals the first


def _worth(history: CallHistory) -> tuple[bool, bool]:
    return history.call_format is not None, history.reads_results


@dataclass(frozen=True, slots=True)
class _Probe:
    """Conversations with one call; some templates write it only where tools are offered."""

    template: ChatTemplate
    call_id: str
    wants_objects: bool

    def takes_both(self, *, with_result: bool) -> bool:
        rendered = self.rendered("probe of content", with_result=with_result)
        return rendered is not None and _holds_call(rendered)

    def rendered(self, content: str | None, *, with_result: bool) -> str | None:
        arguments = {_KEY: _VALUE} if self.wants_objects else _TEXT
        call = {
            "id": self.call_id,
            "type": "function",
            "function": {"name": PROBE_NAME, "arguments": arguments},
        }
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": _RESULT, "tool_call_id": self.call_id},
        ]
        for tools in (None, [_TOOL]):
            try:
                return self.template.render(messages if with_result else messages[:2], tools=tools)
            except RequestError:
                continue
        return None


def _holds_call(rendered: str) -> bool:
    """Whether the call stands there whole, not quoted again, and no ``None`` for the content."""
    parts = (PROBE_NAME, _KEY, _VALUE)
    return all(part in rendered for part in parts) and not (
        f'\\"{_KEY}' in rendered or "None" in rendered
    )
