"""``model.chat_template``: the names of templates that ship, and what is a file."""

from __future__ import annotations

import difflib

from runtime.errors import ConfigError

FIELD = "model.chat_template"
AUTO = "auto"
SHIPPED = ("deepseek-v3", "deepseek-r1", "deepseek-v3.1", "deepseek-v3.2", "kimi-k2")


def is_template_file(value: str) -> bool:
    """Whether ``value`` names a file: it has a slash, or a template's suffix."""
    return "/" in value or value.endswith((".jinja", ".jinja2", ".j2"))


def check_chat_template(path: str, value: str) -> None:
    """Raise ConfigError unless ``value`` is "auto", a template that ships, or a file's path."""
    names = (AUTO, *SHIPPED)
    if value in names or is_template_file(value):
        return
    close = difflib.get_close_matches(value.lower(), names, n=1)
    meant = f"did you mean {close[0]}? Else " if close else ""
    fix = f"{meant}one of {', '.join(names)}, or the path of a file (./NAME.jinja)"
    raise ConfigError(path, value, "is no chat template that ships", fix)
