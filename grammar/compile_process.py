"""Makes grammars of forms: the process that the router starts for it.

``python -m grammar.compile_process FOLDER VOCAB_SIZE`` reads one JSON object a line:
``{"formats": [...], "cpu_s": ..., "is_guarded": ...}``. It answers one line each:
``{"grammars": [...]}``, one for each format as it travels, or ``{"problem": ..., "schema": ...}``,
with the ``"cpu_s"`` that it took. The first format is compiled for the model's vocabulary as well,
as the workers will, and where it is guarded it is tried out (``walks``).

A process of its own, as the library may take minutes, or end, for a schema of a kilobyte, and
importing it imports torch. It ends itself once one request has used its seconds of CPU, and with
the router.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xgrammar

from grammar.grammars import Grammars
from grammar.schemas.documents import document_rules
from grammar.schemas.productive import is_productive
from grammar.vocabulary import read_vocabulary
from grammar.walks import try_out
from runtime.errors import InvalidRequestError
from runtime.process import limit_memory

MAX_BYTES = 4 * 2**30
"""Of address space beyond what the libraries take."""
NICENESS = 10
"""Tokens of others come first where cores are few."""
_PLACE = re.compile(r"^\[[^\]]*\] \S+:\d+: ")
"""When and where in the library's own source an error arose."""
_ENDLESS = (
    "asks for itself without end, or for what it excludes: no text has it. "
    "Fix: let something in it be left out"
)


def _problem(error: BaseException) -> str:
    if isinstance(error, InvalidRequestError) and error.__cause__ is not None:
        error = error.__cause__  # which does not speak of the workers' fields
    return _PLACE.sub("", str(error)).strip()[:300]


class NoDocumentError(ValueError):
    """No document is of the schema of this number in a format."""

    def __init__(self, number: int) -> None:
        super().__init__(_ENDLESS)
        self.number = number


def grammar_of(fmt: Mapping[str, Any]) -> str:
    """The grammar of a format, as it travels.

    Raises:
        NoDocumentError: a schema in it has none.
    """
    tag = {"type": "structural_tag", "format": _with_rules(fmt, itertools.count())}
    return str(xgrammar.Grammar.from_structural_tag(tag).serialize_json())


def _with_rules(fmt: Mapping[str, Any], numbers: Iterator[int]) -> dict[str, Any]:
    """A format with rules in the place of each schema; ``numbers`` counts those."""
    if fmt["type"] == "json_schema":
        number = next(numbers)
        rules = document_rules(fmt["json_schema"], is_compact=fmt["is_compact"])
        if rules is None:
            raise NoDocumentError(number)
        return {"type": "grammar", "grammar": rules}
    result = dict(fmt)
    for name in ("elements", "tags"):
        if name in fmt:
            result[name] = [_with_rules(each, numbers) for each in fmt[name]]
    if isinstance(fmt.get("content"), dict):
        result["content"] = _with_rules(fmt["content"], numbers)
    return result


class Compiler:
    """Of one vocabulary."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grammars = Grammars(read_vocabulary(folder, vocab_size))

    def answer(self, formats: list[Mapping[str, Any]], *, is_guarded: bool) -> dict[str, Any]:
        """What is said of a request."""
        try:
            grammars = [grammar_of(fmt) for fmt in formats]
            if not is_productive(grammars[0]):
                return {"problem": _ENDLESS}
            compiled = self._grammars.compile(grammars[0])
            problem = try_out(compiled, self._vocab_size) if is_guarded else ""
        except NoDocumentError as error:
            return {"problem": str(error), "schema": error.number}
        except Exception as error:  # the library raises bare RuntimeError, and others
            return {"problem": _problem(error)}
        return {"problem": problem} if problem else {"grammars": grammars}


def main(folder: str, vocab_size: str) -> None:
    """Answer until the router ends this or itself."""
    os.nice(NICENESS)
    # Answers alone go to the router: the library writes warnings there, too.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    compiler = Compiler(Path(folder), int(vocab_size))
    limit_memory(MAX_BYTES)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which is to end
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        began = time.process_time()
        answer = compiler.answer(asked["formats"], is_guarded=asked["is_guarded"])
        answer["cpu_s"] = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
