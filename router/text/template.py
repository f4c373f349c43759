"""Chat messages to prompt text: the checkpoint's Jinja template, in a sandbox.

What a template raises is the client's error (for example roles in an order that it does not know),
with the line where it was raised.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import jinja2
import jinja2.meta

from router.errors import RequestError
from router.text.checkpoint_files import special_tokens
from router.text.template_environment import (
    ChatEnvironment,
    TemplateBoundError,
    TemplateRefusalError,
)
from router.text.template_files import template_sources
from runtime.errors import ConfigError

Message = Mapping[str, object]


class TemplateLimitError(RequestError):
    """Rendering takes too long or makes too much."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            f"messages cannot be rendered by the model's chat template: {cause}. "
            "Fix: send fewer or shorter messages, or serve with another template",
            param="messages",
        )
        self.cause = cause


class ChatTemplate:
    """Renders conversations. Thread-safe."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, origin: str = "the chat template"
    ) -> None:
        """``special_tokens`` are the template's variables such as ``bos_token``.

        ``origin``: where it stands, for messages.

        Raises:
            ConfigError: ``source`` is no Jinja template.
        """
        self._environment = ChatEnvironment()
        try:
            names = jinja2.meta.find_undeclared_variables(self._environment.parse(source))
            self._template = self._environment.compile_chat(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            problem = f"is no chat template: {_text_of(error)}{where}"
            fix = "mend the template; beside Jinja's it may use what transformers adds"
            raise ConfigError("model.path", origin, problem, fix) from error
        self.source = source
        self.origin = origin
        self._special_tokens = dict(special_tokens)
        self._end_mark = f"\ufdd2{secrets.token_hex(8)}\ufdd3"
        """Stands behind the content that an answer goes on from; no client can guess it."""
        self.variables = frozenset(names - self._environment.globals.keys())
        """What the template reads of what it is given."""

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
            TemplateLimitError: it goes on too long with them.
        """
        if continue_final_message:
            messages = _with_end_mark(messages, self._end_mark)
        given = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": not continue_final_message,
        }
        taken = sorted(given.keys() & (extra or {}).keys())
        if taken:
            problem = f"chat_template_kwargs.{taken[0]} is said by the request itself"
            raise RequestError(f"{problem}. Fix: leave it out", param="chat_template_kwargs")
        variables = {"documents": None, **self._special_tokens, **(extra or {}), **given}
        try:
            text = self._environment.render(self._template, variables)
        except TemplateRefusalError as error:
            raise RequestError(
                f"messages cannot be rendered by the model's chat template: {error}. "
                "Fix: use the roles and the order that the model knows",
                param="messages",
            ) from error
        except TemplateBoundError as error:
            raise TemplateLimitError(str(error)) from error
        except Exception as error:  # whatever its expressions and filters raise
            raise RequestError(
                "messages cannot be rendered by the model's chat template: "
                f"{_line_of(error.__traceback__)}{_text_of(error)}. "
                "Fix: use the roles, the order and the fields that the model knows",
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


def _text_of(error: Exception) -> str:
    """What it says; foreign errors with their kind, since many say little without it."""
    if isinstance(error, jinja2.TemplateError):
        return (error.message or type(error).__name__).rstrip(".")
    return f"{type(error).__name__}: {error}"


def _line_of(traceback: TracebackType | None) -> str:
    """The line of the template where it was raised, where that is known."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


def checkpoint_templates(folder: Path, *names: str) -> dict[str, ChatTemplate]:
    """The templates of a checkpoint's folder by name, of which some may be absent.

    Args:
        folder: of the checkpoint.
        names: that are wanted; none: all.

    Raises:
        ConfigError: one of them is broken.
    """
    tokens = special_tokens(folder)
    return {
        name: ChatTemplate(source.text, tokens, origin=source.origin)
        for name, source in template_sources(folder).items()
        if not names or name in names
    }
