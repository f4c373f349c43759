"""Lines of a log as a person is shown them: short, without what is there for searching."""

from __future__ import annotations

import re

_LOG_HEAD = re.compile(r"^\S+ (?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ [\w.]+: ")
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: ")
_FIELDS = re.compile(r"( ?\b[\w.]+=('[^']*'|\"[^\"]*\"|\S+))+$")
"""The ``key=value`` pairs at the end of a line: for whoever searches logs."""
_MAX_STAGE_CHARS = 100


def last_stage(lines: tuple[str, ...]) -> str:
    """What the last of ``lines`` says, without time, level, speaker and fields; empty: nothing.

    Warnings of libraries, and the code that Python shows below them, are no stages.
    """
    for line in reversed(lines):
        if _WARNING.match(line) or (line[:1] == " " and "\r" not in line):
            continue
        text = _LOG_HEAD.sub("", line.rsplit("\r", 1)[-1]).strip()
        if text:
            return shortened(_FIELDS.sub("", text) or text, _MAX_STAGE_CHARS)
    return ""


def shortened(text: str, num_chars: int) -> str:
    """``text`` cut between two words, with dots for what is left out."""
    if len(text) <= num_chars:
        return text
    kept = text[: num_chars - 3]
    return f"{kept.rpartition(' ')[0] or kept}..."
