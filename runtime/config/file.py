"""Reading and writing the TOML file of a ``ClusterConfig``.

Strict: an unknown section or key, or a value of the wrong type, is a ConfigError that names the
field's path and says what to write instead. Paths in the file are relative to its folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from runtime.config import (
    ClusterConfig,
    ClusterSection,
    DecodeSection,
    ModelSection,
    PrefillSection,
    RouterSection,
    TierSection,
    TlsSection,
)
from runtime.config.templates import is_template_file
from runtime.errors import ConfigError
from runtime.hub_model import HubModel
from runtime.net.credentials import Credentials
from runtime.net.hosts import own_address
from runtime.net.roles import Role, role_secret
from runtime.parsing import parse_toml

SECRET_VARIABLE = "TANDEM_SECRET"
PREVIOUS_SECRET_VARIABLE = "TANDEM_PREVIOUS_SECRET"
_SECRETS = {("cluster", "secret"), ("cluster", "previous_secret")}
_PATHS = {
    "cluster.run_dir",
    "model.path",
    "model.chat_template",
    "prefill.expert_load",
    "decode.expert_load",
    "router.keys_file",
    "router.models_file",
    "tls.cert",
    "tls.key",
    "tls.ca",
}
_REMOVED = {
    "prefill.collectives": "leave it out: rows move between GPUs by NCCL, which was the faster way",
    "decode.two_batch_overlap": "leave it out: a step of two halves took 1.5 times as long",
}
"""Fields that an older file may have, each with what to do."""
_LISTS: dict[str, type[Any]] = {"tiers": TierSection}
"""What stands in the file as a list of tables, each ``[[NAME]]``."""
_Section = TypeVar(
    "_Section",
    ClusterSection,
    DecodeSection,
    ModelSection,
    PrefillSection,
    RouterSection,
    TlsSection,
)


def load_config(path: Path | None) -> ClusterConfig:
    """The configuration in ``path``, or all defaults for None.

    Raises:
        ConfigError: the file is missing, is no TOML, or a field in it cannot be.
    """
    if path is None:
        return ClusterConfig()
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = error.strerror or str(error)
        fix = "the path of a readable TOML file; a model is the folder of one, or ORG/NAME"
        raise ConfigError("file", str(path), problem, fix) from error
    except ValueError as error:
        raise ConfigError("file", str(path), f"no valid TOML: {error}", "mend that line") from error
    return parse_config(table, base=path.resolve().parent)


def load_own_config(path: Path | None) -> ClusterConfig:
    """The same for a process of this machine; see ``on_this_host``.

    Raises:
        ConfigError: also where this machine has none.
    """
    return on_this_host(load_config(path))


def on_this_host(config: ClusterConfig) -> ClusterConfig:
    """``config`` for this machine: with its address in ``cluster.network``, if that is set.

    Raises:
        ConfigError: it has none.
    """
    if not config.cluster.network:
        return config
    host = own_address(config.cluster.network).address
    cluster = dataclasses.replace(config.cluster, host=host, advertise="", network="")
    return dataclasses.replace(config, cluster=cluster)


def parse_config(table: Mapping[str, object], *, base: Path | None = None) -> ClusterConfig:
    """The configuration that a parsed TOML ``table`` describes.

    ``base`` is the folder that relative paths start from.
    """
    hints = get_type_hints(ClusterConfig)
    sections: dict[str, Any] = {}
    for name, section in table.items():
        if name not in hints:
            _refuse_unknown(name, section, list(hints))
        if name in _LISTS:
            sections[name] = _parse_list(name, section, _LISTS[name])
            continue
        if not isinstance(section, Mapping):
            raise ConfigError(name, section, "is no table", f"a section [{name}]")
        sections[name] = _parse_section(name, section, hints[name])
    config = ClusterConfig(**sections)
    if base is None:
        return config
    return dataclasses.replace(
        config,
        cluster=_with_base(config.cluster, ("run_dir",), base),
        model=_with_base(config.model, ("path", "chat_template"), base),
        prefill=_with_base(config.prefill, ("expert_load",), base),
        decode=_with_base(config.decode, ("expert_load",), base),
        router=_with_base(config.router, ("keys_file", "models_file"), base),
        tls=_with_base(config.tls, ("cert", "key", "ca"), base),
    )


def with_settings(
    config: ClusterConfig, settings: Iterable[str], *, base: Path | None = None
) -> ClusterConfig:
    """``config`` with fields changed as "decode.instances=2" says; the last word on a field counts.

    ``base`` is the folder that relative paths in ``settings`` start from.

    Raises:
        ConfigError: no such field, or no such value.
    """
    hints = get_type_hints(ClusterConfig)
    changes: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, value = split_setting(setting)
        section, _, key = path.partition(".")
        known = get_type_hints(hints[section])
        changes.setdefault(section, {})[key] = _parse_text(path, value, known[key], base)
    # All at once: fields are checked against each other, in whatever order they were given.
    sections: dict[str, Any] = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in changes.items()
    }
    return dataclasses.replace(config, **sections)


def split_setting(setting: str) -> tuple[str, str]:
    """The field's path and the text of its value in ``SECTION.FIELD=VALUE``.

    Raises:
        ConfigError: it does not look like that, or there is no such field.
    """
    path, equals, text = (part.strip() for part in setting.partition("="))
    section, _, key = path.partition(".")
    if not equals or not key:
        fix = "for example decode.instances=2"
        raise ConfigError("--set", setting, "is not SECTION.FIELD=VALUE", fix)
    hints = get_type_hints(ClusterConfig)
    if section in _LISTS:
        raise ConfigError("--set", setting, "is of a list of tables", f"[[{section}]] of the file")
    fields = field_paths()
    if path not in fields:
        of_section = [field for field in fields if field.startswith(f"{section}.")]
        _refuse_unknown(path, text, fields, shown=of_section or list(hints))
    return path, text


def field_paths() -> list[str]:
    """All that ``--set`` can change, each as "decode.instances"."""
    hints = get_type_hints(ClusterConfig)
    sections = {name: get_type_hints(hints[name]) for name in hints if name not in _LISTS}
    return [f"{name}.{field}" for name in sections for field in sections[name]]


def _parse_text(path: str, text: str, expected: type, base: Path | None) -> object:
    """The value that ``text`` of a command line is; a string needs no quotes."""
    try:
        value: object = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text
    if expected is str:
        value = value if isinstance(value, str) else text
        return _based(path, value, base) if base is not None and path in _PATHS else value
    return _parse_value(path, value, expected)


def _with_base(section: _Section, names: Sequence[str], base: Path) -> _Section:
    """``section`` with its relative paths made to start from ``base``."""
    title = type(section).__name__.removesuffix("Section").lower()
    given = {name: getattr(section, name) for name in names}
    changes: dict[str, Any] = {
        name: _based(f"{title}.{name}", path, base) for name, path in given.items()
    }
    return dataclasses.replace(section, **changes)


def _based(path: str, value: str, base: Path) -> str:
    """The path ``value`` from ``base`` on; absolute and empty ones stay as they are, and so do
    names of a model on the hub and of a template that ships.
    """
    if not value or (path == "model.path" and HubModel.meant_by(value, base)):
        return value
    if path == "model.chat_template" and not is_template_file(value):
        return value
    return str(base / Path(value).expanduser())


def _parse_section(name: str, section: Mapping[str, object], section_type: type[Any]) -> object:
    hints = get_type_hints(section_type)
    values: dict[str, object] = {}
    for key, value in section.items():
        path = f"{name}.{key}"
        if key not in hints:
            _refuse_unknown(path, value, [f"{name}.{known}" for known in hints])
        values[key] = _parse_value(path, value, hints[key])
    return section_type(**values)


def _parse_list(name: str, tables: object, section_type: type[Any]) -> tuple[Any, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise ConfigError(name, tables, "is no list of tables", f"a table [[{name}]] for each")
    return tuple(_parse_section(name, table, section_type) for table in tables)


def _parse_value(path: str, value: object, expected: type) -> object:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kinds = get_args(expected) or (expected,)  # of `int | str` both
    if type(value) not in kinds:
        found, names = type(value).__name__, " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(path, value, f"is a {found}", f"a value of type {names}")
    return value


def _refuse_unknown(
    path: str, value: object, known: list[str], *, shown: list[str] | None = None
) -> None:
    """Names what is close among ``known``, else all of them, or those that are ``shown``."""
    if path in _REMOVED:
        raise ConfigError(path, value, "is no longer a field", _REMOVED[path])
    close = difflib.get_close_matches(path, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(shown or known)}"
    raise ConfigError(path, value, "unknown key", hint)


def dump_config(config: ClusterConfig) -> str:
    """``config`` as TOML that ``load_config`` reads back equal; secrets are left out."""
    lines: list[str] = []
    for section_field in dataclasses.fields(config):
        name, section = section_field.name, getattr(config, section_field.name)
        tables = section if name in _LISTS else [section]
        for table in tables:
            lines += [f"[[{name}]]" if name in _LISTS else f"[{name}]", *_lines_of(name, table), ""]
    return "\n".join(lines)


def _lines_of(name: str, table: Any) -> list[str]:
    return [
        f"{item.name} = {_toml_value(getattr(table, item.name))}"
        for item in dataclasses.fields(table)
        if (name, item.name) not in _SECRETS
    ]


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    return repr(value)


def cluster_credentials(config: ClusterConfig, role: Role | None = None) -> Credentials:
    """What a process of ``role`` shows and accepts.

    The secrets are from the configuration, else from the environment; TLS has its files.

    Raises:
        ConfigError: neither has a secret, or it is another role's; or certificates were to be made,
            which is not for a single process to do.
    """
    secret = config.cluster.secret or os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(
            "cluster.secret", "", "no secret", f"set it, or the environment's {SECRET_VARIABLE}"
        )
    if config.tls.mode == "auto":
        problem = "only `tandem up` makes certificates by itself"
        fix = '"files", with tls.cert, tls.key and tls.ca, which `tandem certificates` makes'
        raise ConfigError("tls.mode", "auto", problem, fix)
    previous = config.cluster.previous_secret or os.environ.get(PREVIOUS_SECRET_VARIABLE, "")
    if role is not None:
        for one in filter(None, (secret, previous)):
            role_secret(one, role)
    return Credentials(secret=secret, previous_secret=previous, tls=config.tls.files, role=role)


def secret_variables(credentials: Credentials) -> dict[str, str]:
    """The environment by which another process gets the same secrets."""
    return {
        SECRET_VARIABLE: credentials.secret,
        PREVIOUS_SECRET_VARIABLE: credentials.previous_secret,
    }
