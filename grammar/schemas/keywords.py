"""Keywords about strings, numbers and counts as ``documents`` follows them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grammar.schemas.documents import integer_bounds, number_bounds
from grammar.schemas.formats import FORMATS
from grammar.schemas.numbers import can_step
from grammar.schemas.pattern import check_pattern
from grammar.schemas.schema_errors import Path, SchemaError, shown

MAX_COUNT = 100_000
"""Of items, characters or properties that a schema may ask for or bound."""
Node = Mapping[str, Any]
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


class Keywords:
    """Reads keywords of one schema."""

    def __init__(
        self, leave_out: Callable[[Path, str], None], ignore: Callable[[Path], None]
    ) -> None:
        """``leave_out``: of what no grammar follows, and why; ``ignore``: of mere annotations."""
        self._leave_out, self._ignore = leave_out, ignore

    def counts(self, node: Node, path: Path) -> dict[str, int]:
        """Least and most numbers of characters, items and properties."""
        result: dict[str, int] = {}
        for what in ("Length", "Items", "Properties"):
            for name in (f"min{what}", f"max{what}"):
                if name not in node:
                    continue
                value, place = node[name], (*path, name)
                if not _is_number(value) or value < 0 or value != int(value):
                    fix = f"Fix: send an integer from 0 to {MAX_COUNT}"
                    raise SchemaError(place, f"is {shown(value)}. {fix}")
                if value > MAX_COUNT:
                    self._leave_out(place, f"is {shown(value)}. Fix: send at most {MAX_COUNT}")
                else:
                    result[name] = int(value)
            least, most = result.get(f"min{what}"), result.get(f"max{what}")
            if least is not None and most is not None and least > most:
                raise SchemaError((*path, f"min{what}"), f"is {least}, and max{what} is {most}")
        return result

    def numbers(self, node: Node, path: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
        """What bounds numbers, with ``exclusiveMinimum: true`` as a number."""
        result: dict[str, Any] = {}
        for name in _BOUNDS:
            value, place = node.get(name), (*path, name)
            if name not in node or (value is False and name.startswith("exclusive")):
                continue
            if value is True and name.startswith("exclusive"):  # the drafts before 2017
                closed = name.removeprefix("exclusive").lower()
                result |= {name: result.pop(closed)} if closed in result else {}
            elif not _is_number(value):
                raise SchemaError(place, f"is {shown(value)}. Fix: send a number")
            else:
                result[name] = value
        self._check_order(result, path, kinds)
        step, place = node.get("multipleOf"), (*path, "multipleOf")
        if step is None or (step == 1 and kinds == ("integer",)):
            return result
        if not _is_number(step) or step <= 0:
            raise SchemaError(place, f"is {shown(step)}. Fix: send a number above 0")
        if kinds != ("integer",) or step != int(step):
            self._leave_out(place, "is followed by integers alone. Fix: leave it out")
        elif not can_step(int(step), *integer_bounds(result)):
            self._leave_out(place, "is too large to be followed. Fix: leave it out")
        else:
            result["multipleOf"] = int(step)
        return result

    def strings(self, node: Node, path: Path, counts: dict[str, int]) -> dict[str, Any]:
        """A pattern, a format or lengths: what stands first here is followed, and alone."""
        result: dict[str, Any] = {}
        for name in ("pattern", "format"):
            if not isinstance(node.get(name, ""), str):
                raise SchemaError((*path, name), f"is {shown(node[name])}. Fix: send a string")
        if "pattern" in node:
            try:
                check_pattern(node["pattern"])
                result["pattern"] = node["pattern"]
            except ValueError as error:
                self._leave_out((*path, "pattern"), f"{error}. Fix: write it otherwise")
        if "format" in node and node["format"] not in FORMATS:
            self._ignore((*path, "format"))
        elif "format" in node and not result:
            result["format"] = node["format"]
        leading = next(iter(result), None)
        for name in ("minLength", "maxLength", "format"):
            is_there = name in counts or (name == "format" and node.get("format") in FORMATS)
            if leading not in (None, name) and is_there:
                problem = f"is not followed beside {leading}. Fix: say it in the pattern"
                self._leave_out((*path, name), problem)
                counts.pop(name, None)
        return result

    def _check_order(self, bounds: Node, path: Path, kinds: tuple[str, ...]) -> None:
        low, high = number_bounds(bounds)
        if low is None or high is None:
            return
        is_empty = low.value > high.value
        is_empty |= low.value == high.value and (low.is_open or high.is_open)
        if kinds == ("integer",):
            least, most = integer_bounds(bounds)
            is_empty |= least is not None and most is not None and least > most
        if is_empty:
            name = "exclusiveMinimum" if low.is_open else "minimum"
            raise SchemaError((*path, name), f"is {low.value}, beyond the maximum {high.value}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
