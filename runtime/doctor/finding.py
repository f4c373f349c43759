"""What a check found, and how bad it is."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from pathlib import Path


class Verdict(enum.StrEnum):
    """From harmless to fatal."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """It will serve, slower or less safely than it could."""
    ERROR = "error"
    """It cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact, judged."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether somebody has to do something."""
        return self.verdict in (Verdict.WARNING, Verdict.ERROR)

    def describe(self) -> dict[str, str]:
        """For JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.check}: {self.text}" + (f". Fix: {self.fix}" if self.fix else "")


def read_text(path: Path) -> str:
    """What a small file of the kernel says; empty where there is none, or none for us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path, default: int) -> int:
    """The number in such a file."""
    text = read_text(path)
    try:
        return int(text, 0)
    except ValueError:
        return default
