"""What a chat template does with a conversation of every kind. Found out by rendering."""

from __future__ import annotations

from typing import Any

from router.errors import RequestError
from router.text.call_history import call_history
from router.text.calls.formats import CALL_FORMATS
from router.text.template import ChatTemplate, TemplateLimitError
from runtime.errors import ConfigError

_SYSTEM, _USER, _ANSWER = "probe of system", "probe of user", "probe of answer"
_TOOL = "probe_of_offer"
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "probe",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
]
_TALK = [
    {"role": "user", "content": _USER},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _USER},
]
_GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)
"""Variables that are no switch of the template's own."""


def check_bounded(template: ChatTemplate) -> None:
    """Refuse a template that goes on too long with the least conversation.

    Raises:
        ConfigError: it does; every request would pay for it.
    """
    try:
        template.render(_TALK[:1])
    except TemplateLimitError as error:
        problem = f"a conversation of one message cannot be rendered: {error.cause}"
        raise ConfigError("model.path", template.origin, problem, "mend the template") from error
    except RequestError:
        return  # it wants another conversation, and says which to whoever sends one


def describe_template(template: ChatTemplate) -> str:
    """What the template reads, in one line; or why it cannot render a conversation."""
    try:
        prompt = template.render(_TALK)
    except RequestError as error:
        return f"refuses a conversation: {error.message}"
    history = call_history(template)
    reads = {
        "messages": _USER in prompt and _ANSWER in prompt,
        "system messages": _writes(template, _SYSTEM, system=True),
        "tools": _writes(template, _TOOL, tools=_TOOLS),
        "calls": history is not None,
        "results of calls": history is not None and history.reads_results,
        "documents": "documents" in template.variables,
    }
    parts = [f"reads {', '.join(name for name, is_read in reads.items() if is_read) or 'nothing'}"]
    written = history and history.call_format
    parts += [f"writes calls as {name}" for name, form in CALL_FORMATS.items() if form is written]
    switches = sorted(name for name in template.variables - _GIVEN if not name.endswith("_token"))
    if switches:
        parts.append(f"switched by {', '.join(switches)}")
    return "; ".join(parts)


def _writes(
    template: ChatTemplate,
    text: str,
    *,
    system: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> bool:
    """Whether the prompt holds ``text`` of the system message, or of the tools."""
    first = [{"role": "system", "content": _SYSTEM}] if system else []
    try:
        return text in template.render([*first, *_TALK], tools=tools)
    except RequestError:
        return False
