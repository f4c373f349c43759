"""The file of models that a router serves beside its first one: a table ``[models.NAME]`` each.

    [models.llama-8b]
    path = "/models/llama-8b"
    aliases = ["small"]

Strict, as the configuration: an unknown field or a wrong type is a ConfigError that names it. Paths
are relative to the file's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.config.checks import at_least, one_of
from runtime.config.router import REASONING_PARSERS, TOOL_PARSERS
from runtime.config.templates import check_chat_template, is_template_file
from runtime.errors import ConfigError
from runtime.parsing import parse_toml

FIELD = "router.models_file"
MAX_MODELS = 64
"""Of one router: each is a label of metrics, and has its tokenizer in memory."""
_TYPES: dict[str, type] = {
    "path": str,
    "aliases": list,
    "max_model_len": int,
    "chat_template": str,
    "tool_parser": str,
    "reasoning_parser": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model as a file says it."""

    name: str
    """Under which its workers register: their ``model.name``."""
    path: str
    """Folder of its checkpoint; a router reads tokenizer, template and limits, no weights."""
    aliases: tuple[str, ...] = ()
    max_model_len: int = 0
    chat_template: str = "auto"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        where = f"models.{self.name}"
        if not self.path:
            fix = "the folder of its checkpoint"
            raise ConfigError(f"{where}.path", self.path, "is not set", fix)
        at_least(f"{where}.max_model_len", self.max_model_len, 0)
        check_chat_template(f"{where}.chat_template", self.chat_template)
        one_of(f"{where}.tool_parser", self.tool_parser, TOOL_PARSERS)
        one_of(f"{where}.reasoning_parser", self.reasoning_parser, REASONING_PARSERS)


def read_models(path: Path) -> tuple[ModelEntry, ...]:
    """The models in the file ``path``, in its order.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be.
    """
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(FIELD, str(path), problem, "a readable TOML file") from error
    except ValueError as error:
        raise ConfigError(FIELD, str(path), f"no valid TOML: {error}", "mend that line") from error
    models = table.get("models")
    if set(table) != {"models"} or not isinstance(models, Mapping):
        problem = "is not made of tables [models.NAME]"
        raise ConfigError(FIELD, str(path), problem, "a table [models.NAME] for each model")
    if len(models) > MAX_MODELS:
        problem = f"has {len(models)} models"
        raise ConfigError(FIELD, str(path), problem, f"at most {MAX_MODELS}")
    base = path.resolve().parent
    return tuple(_entry(name, fields, base) for name, fields in models.items())


def _entry(name: str, fields: object, base: Path) -> ModelEntry:
    where = f"models.{name}"
    if not isinstance(fields, Mapping) or not name:
        raise ConfigError(where, "...", "is no table", f"[{where}] with path")
    for key, value in fields.items():
        expected = _TYPES.get(key)
        if expected is None:
            raise ConfigError(f"{where}.{key}", value, "unknown key", f"one of {', '.join(_TYPES)}")
        if type(value) is not expected:
            found, fix = type(value).__name__, f"a value of type {expected.__name__}"
            raise ConfigError(f"{where}.{key}", value, f"is a {found}", fix)
    given: dict[str, Any] = dict(fields)
    for alias in given.get("aliases", []):
        if not isinstance(alias, str) or not alias:
            raise ConfigError(f"{where}.aliases", alias, "is no name", "names, as strings")
    given["aliases"] = tuple(given.get("aliases", []))
    folder, template = given.get("path", ""), given.get("chat_template", "")
    given["path"] = folder and str(base / folder)
    if is_template_file(template):
        given["chat_template"] = str(base / template)
    return ModelEntry(name=name, **given)
