"""Writes what docs/use/api.md has from the code; ``--check`` only says whether it differs.

    python scripts/api_docs.py [--check]

The table of endpoints comes from the router's routes and the first lines of their handlers; the
fields come from the types by which bodies are checked. All between is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aiohttp import web  # noqa: E402
from pydantic import BaseModel  # noqa: E402

from router.http.apis.generate import GenerateRequest  # noqa: E402
from router.http.apis.messages.request import CountRequest, MessagesRequest  # noqa: E402
from router.http.apis.responses.request import InputRequest, ResponsesRequest  # noqa: E402
from router.http.apis.tokenization import DetokenizeRequest, TokenizeRequest  # noqa: E402
from router.http.app import Operations, api_routes  # noqa: E402
from router.http.endpoints import Serving  # noqa: E402
from router.http.openai.hints import HINTS, HOSTED_TOOLS, Body  # noqa: E402
from router.http.openai.schema import ChatRequest, CompletionRequest  # noqa: E402
from router.http.openai.unsupported import unknown_fields  # noqa: E402

DOCUMENT = ROOT / "docs" / "use" / "api.md"
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SHAPES = {
    ("prompt", CompletionRequest): "text, texts, token ids or lists of them",
    ("input_ids", None): "token ids, or lists of them",
    ("stop", None): "text or list of texts",
    ("input", None): "text or list of items",
    ("messages", None): "list of messages",
    ("system", None): "text or list of blocks",
    ("tools", None): "list of tools",
    ("tool_choice", None): "text or object",
    ("thinking", None): "object",
}
"""Fields that have a check of their own in the place of a type, by name and body."""
WORDS = {bool: "true or false", int: "integer", float: "number", str: "text"}


def routes() -> list[web.RouteDef]:
    """Of clients and of those who run the cluster; nobody calls their handlers here."""
    nobody = cast(Serving, None)
    return [*api_routes(nobody), *Operations(nobody).routes()]


def path_of(route: web.RouteDef) -> str:
    """As documents write it: ``{model:.+}`` is ``{model}``."""
    return re.sub(r":[^}]+}", "}", route.path)


def endpoints() -> str:
    """The table of all endpoints."""
    lines = ["| endpoint | what |", "|---|---|"]
    for route in routes():
        first = (route.handler.__doc__ or "").split("\n")[0].rstrip(".")
        what = re.sub(r"^``[A-Z]+ [^`]+``[:,]? ?", "", first).replace("``", "`")
        lines.append(f"| `{route.method} {path_of(route)}` | {what or '-'} |")
    return "\n".join(lines)


def fields() -> str:
    """What each body may hold, and which tools are left out of prompts."""
    posts = {route.path for route in routes() if route.method == "POST"}
    assert posts == set(BODIES), f"no body is known here for {sorted(posts ^ set(BODIES))}"
    parts = [_of_body(path, body) for path, body in BODIES.items()]
    return "\n\n".join([*parts, _of_both(), _hosted()])


def _hosted() -> str:
    """Tools that clients offer and that others run."""
    apis: dict[tuple[str, ...], list[str]] = {}
    for api, kinds in HOSTED_TOOLS.items():
        apis.setdefault(kinds, []).append(api.value)
    told = [
        f"{', '.join(f'`{kind}`' for kind in kinds)} ({' and '.join(names)})"
        for kinds, names in apis.items()
    ]
    return (
        "**Hosted tools**, which are left out of prompts and told, and which no `tool_choice` may "
        f"name: {'; '.join(told)}. A date may stand behind each."
    )


def _of_body(path: str, body: type[BaseModel]) -> str:
    honoured, refused = [], []
    for name, shape in _flat("", body):
        (refused if shape is None else honoured).append(
            f"`{name}`" if shape is None else f"`{name}` ({shape})"
        )
    parts = [f"**`{path}`**: {', '.join(honoured)}."]
    if refused:
        parts.append(f"Refused, but for values that change nothing: {', '.join(refused)}.")
    if issubclass(body, Body):
        hints = ", ".join(f"`{path}`" for path in HINTS[body.api])
        parts.append(f"Taken, of no effect, and told: {hints}.")
    return "\n".join(parts)


def _of_both() -> str:
    """Fields that chat and completions know though they have none of them."""
    parts = [
        f"{what.capitalize()}: {', '.join(f'`{name}`' for name in names)}."
        for what, names in unknown_fields().items()
    ]
    return "\n".join(
        (
            "**Other fields of chat and completions.** " + parts[0],
            *parts[1:],
            "A known field misspelt is refused; all others are ignored, and told by the header "
            "`x-tandem-ignored-fields`. Elsewhere an unknown field is refused.",
        )
    )


def _flat(prefix: str, body: type[BaseModel]) -> list[tuple[str, str | None]]:
    """Fields with their shapes, those of objects by path; None: it is refused."""
    found: list[tuple[str, str | None]] = []
    for name, field in body.model_fields.items():
        inner = _body_within(field.annotation)
        if inner is not None:
            found += _flat(f"{prefix}{name}.", inner)
        elif field.annotation in (None, types.NoneType):
            found.append((prefix + name, None))
        else:
            known = SHAPES.get((name, body)) or SHAPES.get((name, None))
            found.append((prefix + name, known or _shape(field.annotation)))
    return found


def _body_within(annotation: Any) -> type[BaseModel] | None:
    for item in typing.get_args(annotation) or (annotation,):
        if isinstance(item, type) and issubclass(item, BaseModel):
            return item
    return None


def _shape(annotation: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _shape(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shape(arg) for arg in args if arg is not types.NoneType)
    if origin is typing.Literal:
        return " or ".join(f'"{arg}"' for arg in args)
    if origin is list:
        inner = _shape(args[0])
        return "list" if inner == "anything" else f"list of {inner}s"
    if origin is dict or annotation is dict:
        return "object"
    return WORDS.get(annotation, "anything")


def written(text: str) -> str:
    """``text`` with its generated parts as they have to be."""
    for name, made in (("endpoints", endpoints()), ("fields", fields())):
        begin, end = f"<!-- {name}: make api-docs -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        assert found, f"{DOCUMENT.name} has no place for {name}: {begin}"
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"
    return text


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    check = parser.parse_args().check
    text = DOCUMENT.read_text(encoding="utf-8")
    wanted = written(text)
    if text == wanted:
        return 0
    if check:
        print("error: docs/use/api.md differs from the code; run: make api-docs", file=sys.stderr)
        return 1
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
