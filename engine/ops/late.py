"""Modules that are imported when something of them is asked for: those that need Triton."""

import importlib
from types import ModuleType
from typing import Any


def late(name: str) -> Any:
    """Return a stand-in for a module, which is imported at the first look at it.

    Where mypy reads, the module itself is imported instead, so that its functions keep their types.
    """
    return _LateModule(name)


class _LateModule:
    """See `late`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)
