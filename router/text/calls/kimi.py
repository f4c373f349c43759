"""Calls as Kimi-K2 writes them: DeepSeek's places, with marks of its own and an id for a name.

::

    <section begin><call begin>functions.NAME:0<argument begin>ARGUMENTS<call end><section end>

The number counts the calls. The model knows a call's result by this id, so clients get it as it is
written, and send it back with the result.
"""

from __future__ import annotations

import re

from router.text.calls.deepseek import CallMarks
from router.text.calls.events import CallBegin, Offered

KIMI_MARKS = CallMarks(
    calls_begin="<|tool_calls_section_begin|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    calls_end="<|tool_calls_section_end|>",
)
PREFIX = "functions."
_NUMBER = re.compile(r"(?:^|:)\d+$")


def kimi_call(head: str, offered: Offered) -> CallBegin | None:
    """The call of which ``head`` is the id; None: no offered tool is meant.

    Models leave the prefix or the number out. The number alone tells enough where there is one
    tool.
    """
    call_id = head.strip()
    name = _NUMBER.sub("", call_id)
    if call_id and not name and len(offered) == 1:
        return CallBegin(next(iter(offered)), call_id)
    for meant in (name.removeprefix(PREFIX), name):
        if meant in offered:
            return CallBegin(meant, call_id)
    return None
