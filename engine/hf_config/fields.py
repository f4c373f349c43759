"""Typed access to a JSON object; a refusal names the field, its value and the fix.

Absent and null are different things, as in `transformers`: an absent field means its default, and a
null is refused unless null has a meaning of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from runtime.errors import ConfigError

_FIX: Final = "correct the model's config.json"
_BEYOND: Final = 1e300

T = TypeVar("T")


class Fields:
    """A JSON object, or one within it.

    Attributes:
        defaults: paths of fields that were asked for and are absent, with the default that was
            returned; those of objects within it too.
    """

    def __init__(
        self,
        content: Mapping[str, object],
        prefix: str = "",
        defaults: dict[str, object] | None = None,
    ) -> None:
        """`prefix` is what stands before a name in messages."""
        self._content = content
        self._prefix = prefix
        self.defaults: dict[str, object] = {} if defaults is None else defaults

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __bool__(self) -> bool:
        return bool(self._content)

    def get(self, name: str) -> object:
        """Return whatever stands there; None if absent."""
        return self._content.get(name)

    def path(self, name: str) -> str:
        """Return the name as messages have it."""
        return self._prefix + name

    def refuse(self, name: str, problem: str, fix: str = _FIX) -> ConfigError:
        """Return the refusal of a field."""
        return ConfigError(self.path(name), self.get(name), problem, fix)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number; without a default the field is required."""
        if name not in self._content:
            return self._absent(name, default, "number")
        value = self._content[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(name, "a number is needed")
        if not abs(value) < _BEYOND:  # NaN too
            raise self.refuse(name, "a finite number is needed")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer; without a default the field is required."""
        if name not in self._content:
            return self._absent(name, default, "integer")
        value = self.number(name)
        if value != int(value):
            raise self.refuse(name, "an integer is needed")
        return int(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number; None if null or absent."""
        return None if self.get(name) is None else self.number(name)

    def optional_integer(self, name: str) -> int | None:
        """Return an integer; None if null or absent."""
        return None if self.get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool, *, null: bool | None = None) -> bool:
        """Return a truth value.

        Args:
            name: of the field.
            default: if absent.
            null: what null means; None: it is refused.
        """
        if name not in self._content:
            return self._absent(name, default, "truth value")
        value = self._content[name]
        if value is None and null is not None:
            return null
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one id, a list of ids, or nothing as a tuple."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self.refuse(name, "token ids are needed")
        return tuple(ids)

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; empty if null or absent."""
        value = self.get(name)
        items = [] if value is None else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.refuse(name, "a list of names is needed")
        return tuple(items)

    def section(self, name: str) -> "Fields":
        """Return a nested object; empty if null or absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object is needed")
        return Fields(value or {}, f"{self.path(name)}.", self.defaults)

    def _absent(self, name: str, default: T | None, kind: str) -> T:
        if default is None:
            raise self.refuse(name, f"is absent, and this {kind} has to be known")
        self.defaults[self.path(name)] = default
        return default
