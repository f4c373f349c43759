"""Makes grammars of forms: the process that the router starts for it.

``python -m router.text.grammar.compile_process FOLDER VOCAB_SIZE`` reads one JSON object a line:
``{"formats": [...], "cpu_s": ...}``. It answers one line each: ``{"grammars": [...]}``, one for
each format as it travels, or ``{"problem": ..., "schema": ..., "path": [...]}``. The first format
is compiled for the model's vocabulary as well, as the workers will.

A process of its own, as the library may take minutes, or end, for a schema of a kilobyte, and
importing it imports torch. It ends itself once one request has used its seconds of CPU, and with
the router.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xgrammar

from engine.constraint.grammars import Grammars
from engine.constraint.vocabulary import read_vocabulary
from router.text.grammar.productive import is_productive
from router.text.grammar.schema import Path as SchemaPath
from router.text.grammar.schema import subschemas
from runtime.errors import InvalidRequestError

MAX_BYTES = 4 * 2**30
"""Of address space beyond what the libraries take."""
_PLACE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")
"""When and where in the library's own source an error arose."""
_ENDLESS = "asks for itself without end: no text has it. Fix: let something in it be left out"


def _problem(error: BaseException) -> str:
    if isinstance(error, InvalidRequestError) and error.__cause__ is not None:
        error = error.__cause__  # which does not speak of the workers' fields
    return _PLACE.sub("", str(error)).strip()[:300]


def grammar_of(fmt: Mapping[str, Any]) -> str:
    """The grammar of a format, as it travels."""
    tag = {"type": "structural_tag", "format": fmt}
    return str(xgrammar.Grammar.from_structural_tag(tag).serialize_json())


def _schemas_in(fmt: Mapping[str, Any]) -> list[Any]:
    """The schemas of a format, from the first to the last."""
    if fmt["type"] == "json_schema":
        return [fmt["json_schema"]]
    inner = [*fmt.get("elements", ()), *fmt.get("tags", ())]
    inner += [fmt["content"]] if isinstance(fmt.get("content"), dict) else []
    return [schema for each in inner for schema in _schemas_in(each)]


def _fault_of(schema: Any) -> str | None:
    """Why no grammar can be made of a schema by itself; None: one can."""
    try:
        grammar = grammar_of({"type": "json_schema", "json_schema": schema})
        return None if is_productive(grammar) else _ENDLESS
    except Exception as error:
        return _problem(error)


def _deepest_fault(schema: Any) -> tuple[SchemaPath, str] | None:
    """The innermost schema within ``schema`` of which no grammar can be made."""
    problem = _fault_of(schema)
    if problem is None:
        return None
    path: SchemaPath = ()
    defs = schema.get("$defs") if isinstance(schema, dict) else None
    node, is_deeper = schema, True
    while is_deeper:
        is_deeper = False
        for place, child in subschemas(node, path):
            if isinstance(child, dict) and "$ref" in child:
                continue  # what it refers to is looked at where it stands
            whole = {**child, "$defs": defs} if defs and isinstance(child, dict) else child
            inner = _fault_of(whole)
            if inner is not None and inner != _ENDLESS:
                path, node, problem, is_deeper = place, child, inner, True
                break
    return path, problem


class Compiler:
    """Of one vocabulary."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._grammars = Grammars(read_vocabulary(folder, vocab_size))

    def answer(self, formats: list[Mapping[str, Any]]) -> dict[str, Any]:
        """What is said of a request."""
        try:
            grammars = [grammar_of(fmt) for fmt in formats]
            if not is_productive(grammars[0]):
                return self._fault(formats[0], _ENDLESS)
            self._grammars.compile(grammars[0])
        except Exception as error:  # the library raises bare RuntimeError, and others
            return self._fault(formats[0], _problem(error))
        return {"grammars": grammars}

    def _fault(self, fmt: Mapping[str, Any], problem: str) -> dict[str, Any]:
        for number, schema in enumerate(_schemas_in(fmt)):
            found = _deepest_fault(schema)
            if found is not None:
                return {"problem": found[1], "schema": number, "path": found[0]}
        return {"problem": problem}


def _limit_memory() -> None:
    """A grammar that asks for more ends this process alone."""
    num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MAX_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(folder: str, vocab_size: str) -> None:
    """Answer until the router ends this or itself."""
    # Answers alone go to the router: the library writes warnings there, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    compiler = Compiler(Path(folder), int(vocab_size))
    if sys.platform == "linux":
        _limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is to end
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        answer = compiler.answer(asked["formats"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
