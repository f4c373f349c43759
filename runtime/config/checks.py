"""What a single field may be; a bad value is a ConfigError with the field's path and the fix."""

from __future__ import annotations

import re

from runtime.errors import ConfigError

_ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def one_of(path: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(path, value, "unknown value", f"one of {', '.join(choices)}")


def at_least(path: str, value: float, least: float) -> None:
    """Raise ConfigError for a value below ``least``."""
    if value < least:
        raise ConfigError(path, value, f"is below {least}", f"{least} or more")


def at_most(path: str, value: float, most: float) -> None:
    """Raise ConfigError for a value above ``most``."""
    if value > most:
        raise ConfigError(path, value, f"is above {most}", f"{most} or less")


def check_port(path: str, value: int) -> None:
    """Raise ConfigError unless ``value`` is a TCP port, or 0 for any free one."""
    if not 0 <= value <= 65535:
        raise ConfigError(path, value, "is no TCP port", "0 (any free port) to 65535")


def check_origin(path: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is an origin as browsers write it, or "*"."""
    if value != "*" and not _ORIGIN.fullmatch(value):
        fix = "scheme, host and port in small letters without a path, as https://chat.example:8443"
        raise ConfigError(path, value, "is no origin", fix)
