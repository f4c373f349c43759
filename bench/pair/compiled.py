"""Which kernels were compiled during a measurement: one alone takes seconds, and spoils it.

The libraries that compile at run time leave what they made in a folder (`engine.boot.jit_cache`),
so a file that was not there before is a kernel that a request waited for.
"""

from __future__ import annotations

from pathlib import Path

_SUFFIXES = frozenset((".cubin", ".o", ".so"))


class CompiledKernels:
    """Watches the folder of a cache; None where nothing compiles."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known = self._find()

    def take(self) -> list[str]:
        """Files that have come since the last call, relative to the folder."""
        before, self._known = self._known, self._find()
        return sorted(self._known - before)

    def _find(self) -> set[str]:
        if self._folder is None:
            return set()
        found = (path for path in self._folder.rglob("*") if path.suffix in _SUFFIXES)
        return {str(path.relative_to(self._folder)) for path in found}
