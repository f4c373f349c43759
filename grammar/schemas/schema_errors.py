"""What is wrong with a schema, and where. Pure."""

from __future__ import annotations

Path = tuple[str | int, ...]
"""Names and numbers from the whole schema to a part of it."""


class SchemaError(ValueError):
    """A schema that no grammar can be made of: where in it, and why."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(problem)
        self.path = path
        self.problem = problem


def spelled(path: Path) -> str:
    """``("properties", "a", "enum", 0)`` as ``.properties.a.enum[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)


def with_fix(problem: str) -> str:
    """``problem``, with what to do."""
    return problem if "Fix: " in problem else f"{problem}. Fix: change it there"


def shown(value: object) -> str:
    """The beginning of ``value``."""
    return repr(value)[:60]
