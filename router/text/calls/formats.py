"""The ways in which models write calls, by name, and how a chat template's own way is recognised.

A template writes the calls of earlier turns as the model was trained to write its own, so "auto"
renders a conversation with a call and looks at what stands there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from router.text.calls.deepseek import (
    CALL_BEGIN,
    DEEPSEEK_MARKS,
    SEPARATOR,
    DeepSeekCalls,
)
from router.text.calls.dsml import DSML_MARKS, INVOKE, DsmlCalls
from router.text.calls.events import NewCallParser
from router.text.calls.forms import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    GLM,
    HERMES,
    KIMI,
    LLAMA,
    CallShape,
)
from router.text.calls.glm import GLM_MARKS, KEY, GlmCalls
from router.text.calls.json_call import HERMES_MARKS, LLAMA_MARKS, HermesCalls, LlamaCalls
from router.text.calls.kimi import KIMI_MARKS, PREFIX, kimi_call

PROBE_NAME = "probe_of_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """One way to write calls."""

    marks: tuple[str, ...]
    new_parser: NewCallParser
    looks_like: tuple[str, ...]
    """What a rendered call of ``PROBE_NAME`` holds, white space left out."""
    shape: CallShape
    """How calls are put together, for who has to call."""


CALL_FORMATS: Mapping[str, CallFormat] = {
    "deepseek-v3": CallFormat(
        marks=DEEPSEEK_MARKS,
        new_parser=partial(DeepSeekCalls, names_first=False),
        looks_like=(f"{CALL_BEGIN}function{SEPARATOR}{PROBE_NAME}",),
        shape=DEEPSEEK_V3,
    ),
    "deepseek-v3.1": CallFormat(
        marks=DEEPSEEK_MARKS,
        new_parser=partial(DeepSeekCalls, names_first=True),
        looks_like=(f"{CALL_BEGIN}{PROBE_NAME}{SEPARATOR}",),
        shape=DEEPSEEK_V31,
    ),
    "deepseek-v3.2": CallFormat(
        marks=DSML_MARKS,
        new_parser=DsmlCalls,
        looks_like=(f'{INVOKE}name="{PROBE_NAME}">',),
        shape=DEEPSEEK_V32,
    ),
    "glm-4.5": CallFormat(
        marks=GLM_MARKS,
        new_parser=GlmCalls,
        looks_like=(f"{GLM_MARKS[0]}{PROBE_NAME}{KEY}",),
        shape=GLM,
    ),
    "hermes": CallFormat(
        marks=HERMES_MARKS,
        new_parser=HermesCalls,
        looks_like=(
            f'{HERMES_MARKS[0]}{{"name":"{PROBE_NAME}","arguments":{{',
            f'{HERMES_MARKS[0]}{{"arguments":{{',
        ),
        shape=HERMES,
    ),
    "kimi-k2": CallFormat(
        marks=KIMI_MARKS,
        new_parser=partial(DeepSeekCalls, names_first=True, marks=KIMI_MARKS, call_of=kimi_call),
        looks_like=(f"{KIMI_MARKS.call_begin}{PREFIX}{PROBE_NAME}:",),
        shape=KIMI,
    ),
    "llama3-json": CallFormat(
        marks=LLAMA_MARKS,
        new_parser=LlamaCalls,
        looks_like=(f'{{"name":"{PROBE_NAME}","parameters":{{',),
        shape=LLAMA,
    ),
}
"""By the names that ``router.tool_parser`` may have besides "auto" and "none"."""


def recognised(rendered: str) -> CallFormat | None:
    """The format in which ``rendered`` holds a call of ``PROBE_NAME``."""
    text = "".join(rendered.split())
    for call_format in CALL_FORMATS.values():
        if any(looks in text for looks in call_format.looks_like):
            return call_format
    return None
