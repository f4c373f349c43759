"""Where a checkpoint's chat templates stand, ranked as transformers ranks them.

A template may be a file of its own, stand in ``tokenizer_config.json``, or in the
``chat_template.json`` of older processors; each by itself or as several with names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router.text.checkpoint_files import SETTINGS, read_json
from runtime.errors import ConfigError

DEFAULT, TOOL_USE = "default", "tool_use"
"""The usual template, and that for requests with tools."""
_FILE, _FOLDER, _SUFFIX = "chat_template.jinja", "additional_chat_templates", ".jinja"
_FIELD = "chat_template"
_SETTINGS = ("chat_template.json", SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """One template, not compiled."""

    text: str
    origin: str
    """The file that it stands in, relative to the checkpoint's folder."""


def template_sources(folder: Path) -> dict[str, TemplateSource]:
    """The templates that count, by name: `DEFAULT`, `TOOL_USE`, or any other.

    A file ``chat_template.jinja`` goes before whatever the settings say; files of
    ``additional_chat_templates`` go before templates of their name.

    Raises:
        ConfigError: a file that cannot be read, or that has something else for a template.
    """
    found: dict[str, TemplateSource] = {}
    usual = folder / _FILE
    if usual.exists():
        found[DEFAULT] = _read(folder, usual)
    else:
        for name in reversed(_SETTINGS):
            found |= _of_settings(folder / name)
    for path in sorted((folder / _FOLDER).glob(f"*{_SUFFIX}")):
        found[path.name.removesuffix(_SUFFIX)] = _read(folder, path)
    return found


def overruled_templates(folder: Path) -> Iterator[str]:
    """Sentences about templates that do not count and differ from the one that does.

    Raises:
        ConfigError: as `template_sources`.
    """
    counts = template_sources(folder)
    for file in _SETTINGS:
        for name, source in _of_settings(folder / file).items():
            winner = counts.get(name)
            if winner is None:
                yield f"the template {name!r} of {file} does not count beside {_FILE}"
            elif winner.text.strip() != source.text.strip():
                yield f"the template {name!r} of {file} differs from {winner.origin}, which counts"


def _read(folder: Path, path: Path) -> TemplateSource:
    origin = str(path.relative_to(folder))
    try:
        return TemplateSource(text=path.read_text(encoding="utf-8"), origin=origin)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{origin} cannot be read: {error}"
        raise ConfigError("model.path", str(folder), problem, "mend the file") from error


def _of_settings(path: Path) -> dict[str, TemplateSource]:
    value = read_json(path).get(_FIELD)
    if value is None:
        return {}
    if isinstance(value, str):
        value = {DEFAULT: value}
    elif isinstance(value, list) and all(map(_has_name, value)):
        value = {entry["name"]: entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(
        isinstance(part, str) for pair in value.items() for part in pair
    ):
        problem = f"{_FIELD} is no text, and no list of objects with name and template"
        raise ConfigError("model.path", str(path), problem, "mend the file")
    return {name: TemplateSource(text=text, origin=path.name) for name, text in value.items()}


def _has_name(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)
