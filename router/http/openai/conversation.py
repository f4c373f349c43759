"""Between a chat request and the model's formats: what the template gets, what reads the answer.

Pure; after the request was checked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson

from router.errors import RequestError
from router.http.openai.response import Prompt
from router.http.openai.schema import ChatRequest, check_depth
from router.model import ServedModel
from router.text.call_history import CallHistory
from router.text.message import MessageReader
from router.text.reasoning import ReasoningParser, Start
from router.text.template import ChatTemplate


def offered_tools(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model may call."""
    return [] if body.tool_choice == "none" else body.tools or []


def template_for(body: ChatRequest, model: ServedModel) -> ChatTemplate | None:
    """What writes the prompt: calls and results of earlier turns are of tools, too."""
    has_calls = any(m.get("tool_calls") or m["role"] == "tool" for m in body.messages)
    return model.tool_template if has_calls or offered_tools(body) else model.chat_template


def template_messages(body: ChatRequest, history: CallHistory | None) -> list[dict[str, Any]]:
    """The messages as the chat template takes them.

    Raises:
        RequestError: a call's arguments are no object, and the template wants one.
    """
    return [
        _with_calls(index, message, history) if history and message.get("tool_calls") else message
        for index, message in enumerate(body.messages)
    ]


def _with_calls(index: int, message: dict[str, Any], history: CallHistory) -> dict[str, Any]:
    content = message["content"] if history.takes_both else None
    message = {**message, "content": content or history.no_content}
    if not history.wants_objects:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        path = f"messages[{index}].tool_calls[{number}].function.arguments"
        arguments = _object(path, call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _object(path: str, text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        value = None
    check_depth(path, value)
    if not isinstance(value, dict):
        raise RequestError(
            f"{path} = {text[:80]!r} is no JSON object, and the model's chat template reads "
            "no other arguments. Fix: send an object",
            param=path,
        )
    return value


def start_of_output(body: ChatRequest, model: ServedModel, prompt: str) -> Start:
    """What ``prompt``, as the template wrote it, says of the reasoning."""
    reasoning = model.formats.reasoning
    if reasoning is None:
        return Start.CLOSED
    final = body.messages[-1]
    return reasoning.start_of(prompt, final["content"] if body.continues_final else None)


def tells_reasoning(body: ChatRequest, model: ServedModel) -> bool:
    """Whether messages have the fields of reasoning, whether there is any or not."""
    is_wanted = body.separate_reasoning is not False and body.include_reasoning is not False
    return model.formats.reasoning is not None and is_wanted


def most_calls(body: ChatRequest) -> int | None:
    """How many tools an answer may call; None: any number.

    Where calls have to be, and nothing is said of their number, a weak model would go on for ever.
    """
    if body.parallel_tool_calls is False or body.named_tool is not None:
        return 1
    if body.max_tool_calls is None and body.parallel_tool_calls is None and body.has_to_call:
        return 1
    return body.max_tool_calls


def new_reader(
    body: ChatRequest, model: ServedModel, prompt: Prompt, *, has_form: bool = False
) -> MessageReader | None:
    """What reads one choice's output; None where all of it is the answer.

    ``has_form``: a grammar holds behind the mark that ends the reasoning, and sees to the mark.
    """
    formats, tools = model.formats, offered_tools(body)
    reasoning = calls = None
    if formats.reasoning is not None and prompt.start is not Start.CLOSED:
        reasoning = ReasoningParser(formats.reasoning, prompt.start)
    if tools and formats.calls is not None:
        functions = [tool["function"] for tool in tools]
        offered = {f["name"]: f.get("parameters") or {} for f in functions}
        calls = partial(formats.calls.new_parser, offered)
    if reasoning is None and calls is None:
        return None
    return MessageReader(
        formats.marks,
        reasoning,
        calls,
        hides_reasoning=body.include_reasoning is False,
        calls_end_reasoning=not has_form,
        most_calls=most_calls(body),
    )
