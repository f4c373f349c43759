"""What real clients send to any server and cannot leave out: taken, of no effect, and told.

The tables here are the one place that names such fields and tools, for all APIs. A hint is taken
out of a body before the body is checked, and the answer's header names it, unless its value says
what is so anyway. A misspelt name is in no table and refused as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from pydantic import BaseModel, PrivateAttr

IGNORED_HEADER = "x-tandem-ignored-fields"

Neutral = tuple[object, ...]
"""Values that say what is so anyway, beside null: nobody has to be told of them."""


class Api(Enum):
    """Whose bodies have hints."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"


_OF_OPENAI: Mapping[str, Neutral] = {
    "client_metadata": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": (),
    "store": (False,),
    "stream_options.include_obfuscation": (False,),
}
_OF_ENGINES = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "guided_decoding_backend"),
    *("kv_transfer_params", "mm_processor_kwargs", "request_id", "return_tokens_as_token_ids"),
    *("rid", "spaces_between_special_tokens", "stream_reasoning", "vllm_xargs"),
)
"""What routers and clients of other engines add."""
_OF_COMPLETIONS: Mapping[str, Neutral] = {
    **_OF_OPENAI,
    **dict.fromkeys(_OF_ENGINES, ()),
    **dict.fromkeys(("metadata", "prediction", "safety_identifier", "user"), ()),
}
_CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
"""Every prefix is cached anyway."""

HINTS: Mapping[Api, Mapping[str, Neutral]] = {
    Api.COMPLETIONS: {**_OF_COMPLETIONS, "parallel_tool_calls": ()},
    Api.CHAT: {
        **_OF_COMPLETIONS,
        "cache_control": (),
        "messages.cache_control": (),
        **{f"messages.content.{mark}": () for mark in _CACHE_MARKS},
        "tools.cache_control": (),
    },
    Api.RESPONSES: {
        **_OF_OPENAI,
        "context_management": ([],),
        "truncation": ("disabled",),
        "reasoning.summary": (),
        "reasoning.generate_summary": (),
        "input.content.annotations": ([],),
        "input.content.logprobs": ([],),
        **{f"input.content.{mark}": () for mark in _CACHE_MARKS},
        **{f"input.output.{mark}": () for mark in _CACHE_MARKS},
        "tools.allowed_callers": ([], ["direct"]),
        "tools.cache_control": (),
        "tools.defer_loading": (False,),
        "tools.output_schema": (),
    },
    Api.MESSAGES: {
        "betas": ([],),
        "cache_control": (),
        "context_management": ({}, {"edits": []}),
        "diagnostics": ({},),
        "metadata": ({},),
        "system.cache_control": (),
        "messages.content.cache_control": (),
        "messages.content.content.cache_control": (),
        "tools.allowed_callers": ([], ["direct"]),
        "tools.cache_control": (),
        "tools.defer_loading": (False,),
        "tools.eager_input_streaming": (False,),
        "tools.input_examples": ([],),
    },
}
"""By their paths, which lead through the items of lists."""
_Tree = dict[str, "_Tree | Neutral"]


def _tree_of(hints: Mapping[str, Neutral]) -> _Tree:
    """The same by the fields that the paths lead through, for one walk over a body."""
    root: _Tree = {}
    for path, neutral in hints.items():
        *outer, name = path.split(".")
        node = root
        for field in outer:
            inner = node.setdefault(field, {})
            assert isinstance(inner, dict), f"{path} is within another hint"
            node = inner
        node[name] = neutral
    return root


_TREES = {api: _tree_of(hints) for api, hints in HINTS.items()}

_TOOLS_OF_OPENAI = (
    *("apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview"),
    *("custom", "image_generation", "local_shell", "namespace", "programmatic_tool_calling"),
    *("shell", "tool_search", "web_search", "web_search_preview"),
)
HOSTED_TOOLS: Mapping[Api, tuple[str, ...]] = {
    Api.CHAT: _TOOLS_OF_OPENAI,
    Api.RESPONSES: _TOOLS_OF_OPENAI,
    Api.MESSAGES: (
        *("advisor", "bash", "browser_toolset", "code_execution", "computer", "computer_toolset"),
        *("memory", "text_editor", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search"),
    ),
}
"""Types of tools that no prompt is told of, with or without a date behind. Tools that name what is
the client's own (files, servers of tools) are not among them: an answer would lack it."""
IGNORED_INCLUDES = (
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url"),
    *("file_search_call.results", "message.input_image.image_url", "reasoning.encrypted_content"),
    *("web_search_call.action.sources", "web_search_call.results"),
)
"""Of ``include`` in responses: of hosted tools, and thoughts, which come in the open."""
_DATE = re.compile(r"_[0-9_]+$")


class Body(BaseModel):
    """A body that may have hints."""

    api: ClassVar[Api]
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """What was taken and has no effect, by the client's names; others may add to it."""
        return self._ignored


class OfferedTools(list[dict[str, Any]]):
    """The functions among a client's tools."""

    def __init__(
        self, functions: Sequence[dict[str, Any]], places: Sequence[int], hosted: Sequence[str] = ()
    ) -> None:
        """``places``: where each stood among all; ``hosted``: types of those left out."""
        super().__init__(functions)
        self.places = list(places)
        self.ignored = [f"tools.{kind}" for kind in dict.fromkeys(hosted)]

    def names(self) -> dict[str, str]:
        """Where the client has each of them."""
        return {f"tools[{number}]": f"tools[{place}]" for number, place in enumerate(self.places)}


def take_hints(fields: dict[str, Any], api: Api) -> list[str]:
    """Take the hints of ``api`` out of a body; returns the names of those that say something."""
    found: dict[str, None] = {}
    _take(fields, _TREES[api], "", found)
    return list(found)


def _take(value: object, tree: _Tree, prefix: str, found: dict[str, None]) -> None:
    """Take what ``tree`` names out of ``value``, and out of each item of a list."""
    if isinstance(value, list):
        for item in value:
            _take(item, tree, prefix, found)
    elif isinstance(value, dict):
        for name, below in tree.items():
            if name not in value:
                continue
            if isinstance(below, dict):
                _take(value[name], below, f"{prefix}{name}.", found)
                continue
            given = value.pop(name)
            if given is not None and given not in below:
                found[prefix + name] = None


def is_hosted(kind: object, api: Api) -> bool:
    """Whether tools of the type ``kind`` are left out of prompts."""
    return isinstance(kind, str) and _DATE.sub("", kind) in HOSTED_TOOLS[api]
