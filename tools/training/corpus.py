"""The text that the bundled model learns from: the standard library of the running Python.

Not a crawler: it reads files that every CPython installation carries, namely the library's source
with its tests, and the language reference that `pydoc` ships as `pydoc_data/topics.py`. All of it
is under the Python Software Foundation License 2.0. The key idea is determinism: the same Python
release gives the same documents in the same order with the same held-out split, which `digest`
proves in one line.

    python -m tools.training.corpus        # print the size and the digest
"""

import ast
import hashlib
import json
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

LICENSE: Final = "PSF-2.0"
# Files of tables, or of one machine: nothing in them generalises.
_EXCLUDED_PARTS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "encodings"})
_EXCLUDED_NAMES: Final = frozenset({"topics.py", "sitecustomize.py"})
_MAX_BYTES: Final = 400_000
_MAX_MEAN_LINE: Final = 90
_MAX_NUMERIC_SHARE: Final = 0.16
_HELD_OUT_PERCENT: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One file or reference topic.

    Attributes:
        name: path below the library folder with forward slashes, or `topic/NAME`.
        text: the whole content, lines ended by a newline alone.
    """

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the document belongs to the held-out split; decided by its name alone."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 100 < _HELD_OUT_PERCENT


def build_corpus(library: Path | None = None) -> list[Document]:
    """Return the documents of a standard library, sorted by name.

    Args:
        library: folder that holds `os.py`; by default that of the running interpreter.

    Raises:
        ValueError: the folder holds no Python source.
    """
    root = library if library is not None else Path(sysconfig.get_paths()["stdlib"])
    documents = sorted((*_sources(root), *_topics(root)), key=lambda document: document.name)
    if not documents:
        raise ValueError(f"{root} holds no Python source: point at the folder of os.py")
    return documents


def digest(documents: Iterable[Document]) -> str:
    """Return the SHA-256 of all names and texts in order, as hexadecimal digits."""
    sha = hashlib.sha256()
    for document in documents:
        sha.update(document.name.encode() + b"\0" + document.text.encode() + b"\0")
    return sha.hexdigest()


def _sources(root: Path) -> Iterator[Document]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        if _excluded(PurePosixPath(name)) or path.stat().st_size > _MAX_BYTES:
            continue
        text = _read(path)
        if text is not None and _teaches(text):
            yield Document(name=name, text=text)


def _excluded(name: PurePosixPath) -> bool:
    return (
        not _EXCLUDED_PARTS.isdisjoint(name.parts)
        or name.name in _EXCLUDED_NAMES
        or name.name.startswith("_sysconfigdata")
        or name.parts[0].startswith("config-")
    )


def _read(path: Path) -> str | None:
    """Return the text of a file, or None where it is not valid UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _teaches(text: str) -> bool:
    """Whether a source is prose and code rather than a table of numbers or escapes."""
    if len(text) < 40:
        return False
    numeric = sum(text.count(digit) for digit in "0123456789\\")
    mean_line = len(text) / (text.count("\n") + 1)
    return mean_line <= _MAX_MEAN_LINE and numeric / len(text) <= _MAX_NUMERIC_SHARE


def _topics(root: Path) -> Iterator[Document]:
    """Read the language reference, which is a source file with one big dict of strings."""
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for name, text in ast.literal_eval(statement.value).items():
                yield Document(name=f"topic/{name}", text=text)


def _main() -> None:
    documents = build_corpus()
    json.dump(
        {
            "python": platform.python_version(),
            "license": LICENSE,
            "num_documents": len(documents),
            "num_held_out": sum(document.held_out for document in documents),
            "num_bytes": sum(len(document.text.encode()) for document in documents),
            "sha256": digest(documents),
        },
        sys.stdout,
        indent=2,
    )
    print()


if __name__ == "__main__":
    _main()
