"""Short texts made from the corpus: chat examples, and functions that stand alone.

Not instruction data written by people, and far too little to make an assistant: just enough that a
chat request gets code, that a prompt like `def add(a, b):` is continued as a function of a module,
and that the model learns to end. In a chat example the docstring asks and the function answers. A
hash of its text decides what becomes of a function, so the set is the same on every machine.
"""

import ast
import hashlib
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tools.training.corpus import Document

_MIN_LINES: Final = 3
_MAX_LINES: Final = 40
# Of a hundred documented functions, the first share is asked for, the second stands alone.
_ASKED_PERCENT: Final = 30
_ALONE_PERCENT: Final = 30
_WORDINGS: Final = (
    "Write a Python function `{signature}`. {summary}",
    "{summary}",
    "def {signature}:\n    {summary}",
    "Write `{signature}` in Python: {summary}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One question and its answer, both plain text without special tokens."""

    question: str
    answer: str


def exchanges(document: Document) -> Iterator[Exchange]:
    """Yield the chat examples of one document, in source order; none if it does not parse."""
    for node, docstring, code in _documented(document.text):
        choice = _hash(code)
        if choice % 100 < _ASKED_PERCENT:
            summary = " ".join(docstring.split("\n\n")[0].split())
            signature = f"{node.name}({ast.unparse(node.args)})"
            wording = _WORDINGS[(choice // 100) % len(_WORDINGS)]
            question = wording.format(signature=signature, summary=summary)
            yield Exchange(question=question, answer=code)


def functions(document: Document) -> Iterator[str]:
    """Yield the source of functions that stand alone, in source order, without indentation."""
    for _node, _docstring, code in _documented(document.text):
        if _ASKED_PERCENT <= _hash(code) % 100 < _ASKED_PERCENT + _ALONE_PERCENT:
            yield code + "\n"


def _documented(source: str) -> Iterator[tuple[ast.FunctionDef, str, str]]:
    """Yield (node, docstring, dedented code) of every documented function of moderate length."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node)
        if docstring and _MIN_LINES <= node.end_lineno - node.lineno + 1 <= _MAX_LINES:
            code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node, docstring, code


def _hash(code: str) -> int:
    return int(hashlib.sha256(code.encode()).hexdigest(), 16)
