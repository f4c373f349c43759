"""Chat messages to prompt text: the checkpoint's Jinja template, in a sandbox.

A template comes with a checkpoint and is not trusted: it cannot reach Python objects or change what
it is given. What it raises is the client's error (for example roles in an order that it does not
know).
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import RequestError
from router.text.tokenizer import read_json, token_content
from runtime.errors import ConfigError

Message = Mapping[str, object]
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as checkpoints' templates ask for it, never escaped: texts may hold marks of ours."""
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """Renders conversations. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are the template's variables such as ``bos_token``.

        Raises:
            ConfigError: ``source`` is no Jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            problem = f"the chat template is broken in line {error.lineno}: {error.message}"
            raise ConfigError("model.path", source[:40], problem, "mend the template") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._end_mark = f"\ufdd2{secrets.token_hex(8)}\ufdd3"
        """Stands behind the content that an answer goes on from; no client can guess it."""
        self.variables = frozenset(names)
        """What the template reads."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        continue_final_message: bool = False,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for the next assistant message, or for the rest of the last one.

        Args:
            messages: of the conversation.
            tools: that are offered, as clients send them; None: none are.
            continue_final_message: go on with the last message instead of beginning another.
            extra: variables of the template.

        Raises:
            RequestError: the template refuses the messages.
        """
        variables = {**self._special_tokens, **(extra or {})}
        if continue_final_message:
            messages = _with_end_mark(messages, self._end_mark)
        try:
            text = self._template.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=not continue_final_message,
                **variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"messages cannot be rendered by the model's chat template: {error}. "
                "Fix: use the roles and the order that the model knows",
                param="messages",
            ) from error
        return _cut_at(text, self._end_mark) if continue_final_message else text


def _with_end_mark(messages: Sequence[Message], mark: str) -> list[Message]:
    """``messages`` with ``mark`` behind the last content, of which spaces at its end are left out.

    The content alone would not do: what the template puts behind it may spell it once more.
    """
    final = messages[-1]
    content = str(final.get("content") or "").rstrip()
    if not content:
        raise _nothing_to_continue("has no content to continue")
    return [*messages[:-1], {**final, "content": content + mark}]


def _cut_at(text: str, mark: str) -> str:
    """``text`` up to the last ``mark``."""
    before, found, _ = text.rpartition(mark)
    if not found:
        raise _nothing_to_continue("is not written by the model's chat template")
    return before.replace(mark, "")


def _nothing_to_continue(problem: str) -> RequestError:
    return RequestError(
        f"messages: the last message {problem}. "
        "Fix: give it content, or leave out continue_final_message and prefix",
        param="messages",
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """The variables that templates have for a checkpoint's tokens."""
    settings = read_json(folder / "tokenizer_config.json")
    return {key: token_content(settings.get(key)) or "" for key in _TOKEN_NAMES}


def load_chat_template(folder: Path, name: str = "default") -> ChatTemplate | None:
    """The template from chat_template.jinja or tokenizer_config.json; None where there is none.

    ``name``: of several, as checkpoints have them: "default", or "tool_use" for offered tools.

    Raises:
        ConfigError: the template is broken.
    """
    settings = read_json(folder / "tokenizer_config.json")
    usual, further = folder / "chat_template.jinja", folder / "additional_chat_templates"
    path = usual if name == "default" else further / f"{name}.jinja"
    source: object = settings.get("chat_template")
    if path.exists():
        source = path.read_text(encoding="utf-8")
    elif isinstance(source, list) and not usual.exists():
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get(name)
    elif name != "default":
        source = None
    return ChatTemplate(source, special_tokens(folder)) if isinstance(source, str) else None
