"""The Jinja that chat templates are written in: transformers' additions, a sandbox, and bounds.

A template comes with a checkpoint and is not trusted: it cannot reach Python objects, change what
it is given, or go on for ever. Nothing can stop a thread from outside, so the template looks at a
clock itself: at each turn of a loop, and at each call, filter and test. What takes one step and
makes much (a text times a number, a width, a replacement) is measured before it is made.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
"""Of CPU time, for one prompt: a conversation of megabytes takes a tenth of a second."""
MAX_CHARS = 2**25
"""Of a prompt, and of any text or list that is made on the way."""
MAX_INDENT = 16
"""Of JSON; deep values repeat it."""

_MARKS = re.compile(r"\\(?:u(fdd[0-3])|.)")
"""An escape of JSON; the group is one of the characters that the router marks texts with."""
_WIDE = re.compile(r"\d{6}|%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""Widths in a format: too great, or told by an argument."""


class TemplateRefusalError(jinja2.TemplateError):
    """What a template says by ``raise_exception``."""


class TemplateBoundError(jinja2.TemplateError):
    """A template takes too long, or makes too much."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates and bounds them. Thread-safe."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        # Folding constants would run parts of the template when it is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _Generation, _Bounds],
        )
        self._clock = threading.local()
        self.filters["tojson"] = _tojson
        for table in (self.filters, self.tests):
            for name, function in list(table.items()):
                table[name] = self._counted(function, _CHECKS.get(name))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _NewDict()
        self.globals.pop("lipsum")

    def compile_chat(self, source: str) -> jinja2.Template:
        """The template of ``source``.

        Raises:
            jinja2.TemplateSyntaxError: it is none.
        """
        tree = cast(nodes.Template, _Counting(self).visit(self.parse(source)))
        code = self.compile(tree)
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def render(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        """The text of a template of this environment.

        Raises:
            TemplateBoundError: it takes too long, or makes too much.
            Exception: whatever else the template raises.
        """
        self._clock.end = time.thread_time() + MAX_SECONDS
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            pieces.append(piece)
            num_chars += len(piece)
            _check_size(num_chars)
        return "".join(pieces)

    def tick(self) -> None:
        """Raise TemplateBoundError when the time of this thread's rendering is over."""
        if time.thread_time() > self._clock.end:
            raise TemplateBoundError(f"it takes more than {MAX_SECONDS:g} s of CPU time")

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """See `jinja2.sandbox.SandboxedEnvironment`."""
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str):
            check = _CHECKS.get(name)
            if check is not None:
                check(owner, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See `jinja2.sandbox.SandboxedEnvironment`."""
        _CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See `jinja2.sandbox.SandboxedEnvironment`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _counted(
        self, function: Callable[..., Any], check: Callable[..., None] | None
    ) -> Callable[..., Any]:
        """``function``, a filter or a test, that looks at the clock and at what it would make."""
        num_hidden = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if check is not None:
                check(*args[num_hidden:], **kwargs)
            return function(*args, **kwargs)

        return counted


class _Generation(Extension):
    """``{% generation %}``, around what the assistant writes: of training, without effect here."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """See `jinja2.ext.Extension`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Bounds(Extension):
    """What `_Counting` writes into templates."""

    def tick(self) -> str:
        """See `ChatEnvironment.tick`."""
        cast(ChatEnvironment, self.environment).tick()
        return ""

    def join(self, *parts: object) -> str:
        """The texts of ``~``."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)


class _Counting(NodeTransformer):
    """Lets each turn of a loop look at the clock, and each ``~`` at what it makes."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        """See `jinja2.visitor.NodeTransformer`."""
        self.generic_visit(node)
        node.body.insert(0, self._placed(nodes.ExprStmt(self._call("tick", [])), node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """See `jinja2.visitor.NodeTransformer`."""
        self.generic_visit(node)
        return self._placed(self._call("join", node.nodes), node)

    def _call(self, name: str, args: list[nodes.Expr]) -> nodes.Call:
        function = nodes.ExtensionAttribute(_Bounds.identifier, name)
        return nodes.Call(function, args, [], None, None)

    def _placed(self, node: nodes.Node, where: nodes.Node) -> nodes.Node:
        return node.set_lineno(where.lineno).set_environment(self._environment)


class _NewDict:
    """``dict`` of templates; the type itself would let them change what they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See `dict`."""
        return dict.fromkeys(*args)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusalError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as checkpoints' templates ask for it; marks of ours in texts are never escaped."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if not ensure_ascii:
        return text
    return _MARKS.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[0], text)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateBoundError(f"it makes more than {MAX_CHARS} characters")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_times(left: object, right: object) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(times, int):
            _check_size(_length(value) * times)
            _check_power(times, 1)


def _check_power(left: object, right: object) -> None:
    """Numbers of ten thousand digits are slow by themselves."""
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * right * 2**10)


def _check_sum(left: object, right: object) -> None:
    _check_size(_length(left) + _length(right))


def _check_format(text: object, /, *_: object, **__: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TemplateBoundError(f"the format {text[:80]!r} has a width without a bound")


def _check_replace(text: object, /, old: object, new: object, *_: object, **__: object) -> None:
    text, old = str(text), str(old)
    times = text.count(old) if old else len(text) + 1
    _check_size(len(text) + times * len(str(new)))


def _check_join(first: object, /, d: object = "", *_: object, **__: object) -> None:
    """Of ``glue.join(items)``, or of ``items | join(d)``."""
    glue, items = (first, d) if isinstance(first, str) else (d, first)
    if isinstance(items, list | tuple):
        _check_size(sum(map(_length, items)) + len(items) * _length(glue))


def _check_width(value: object, /, *args: object, **kwargs: object) -> None:
    """Of what takes a number: as many for each line or tab; or a text: once for each character."""
    num_lines = 1 + sum(map(value.count, "\n\t")) if isinstance(value, str) else 1
    for width in (*args, *kwargs.values()):
        if isinstance(width, int):
            _check_size(width * num_lines)
        _check_size(_length(width) * max(1, _length(value)))


def _check_indent(
    _: object, /, ensure_ascii: object = False, indent: object = None, **__: object
) -> None:
    width = indent if isinstance(indent, int) else _length(indent)
    if width > MAX_INDENT:
        raise TemplateBoundError(f"it indents JSON by more than {MAX_INDENT}")


def _check_table(text: object, /, table: object = None, *_: object) -> None:
    if isinstance(table, dict):
        _check_size(_length(text) * max(map(_length, table.values()), default=0))


_OF_WIDTHS = (
    *("center", "ljust", "rjust", "zfill", "expandtabs"),
    *("indent", "wordwrap", "batch", "slice"),
)
_CHECKS: Mapping[str, Callable[..., None]] = {
    "*": _check_times,
    "**": _check_power,
    "+": _check_sum,
    "%": _check_format,
    "format": _check_format,
    "replace": _check_replace,
    "join": _check_join,
    "translate": _check_table,
    "tojson": _check_indent,
    **dict.fromkeys(_OF_WIDTHS, _check_width),
}
"""What refuses what an operator, a filter or a method of texts would make too much of."""
