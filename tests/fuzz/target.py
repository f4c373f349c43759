"""What a target is, and the file in which its inputs are kept."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser, as a function of bytes."""

    run: Callable[[bytes], object]
    """Parses; whatever else it asserts of the result holds for every input."""
    refusals: tuple[type[Exception], ...] = ()
    """The parser's own errors: what it may say of an input. Anything else is a crash."""
    seeds: tuple[bytes, ...]
    """Inputs by hand, of which others are made."""
    words: tuple[str, ...] = ()
    """Of which inputs are put together, beside what is found in comparisons."""
    is_json: bool = False
    """Whether inputs are changed as JSON documents, and not only as bytes."""

    def try_one(self, data: bytes) -> None:
        """Parse one input; raises what is no refusal."""
        try:
            self.run(data)
        except self.refusals:
            return


def corpus_file(name: str) -> Path:
    """Where the inputs of a target are kept: a line each, as Python writes bytes."""
    return CORPUS / f"{name}.txt"


def read_corpus(name: str) -> list[bytes]:
    """The inputs that were kept of a target; none where there is no file."""
    path = corpus_file(name)
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [ast.literal_eval(line) for line in lines]


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Keep ``inputs``, the shortest first; no file where there are none."""
    lines = [f"{data!r}\n" for data in sorted(set(inputs), key=lambda data: (len(data), data))]
    path = corpus_file(name)
    if lines:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines), encoding="ascii")
    else:
        path.unlink(missing_ok=True)
