"""The file of API keys, in TOML: a table ``[keys.NAME]`` for each, with its hash and its limits.

    [keys.alice]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    models = ["DeepSeek-V3"]
    requests_per_minute = 60

Strict, as the configuration: an unknown field or a wrong type is a ConfigError that names it. A
file without any ``[keys]`` is refused, too: a half-written one must not lock everybody out.
`add_to_file` and `remove_from_file` leave the other lines as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from router.keys.record import MAX_KEYS, KeyLimits, KeyRecord, Right, check_name, parse_right
from runtime.errors import ConfigError
from runtime.parsing import parse_toml

FIELD = "router.keys_file"
_LIMITS = tuple(item.name for item in dataclasses.fields(KeyLimits))
_TYPES: dict[str, type] = {
    "sha256": str,
    "models": list,
    "rights": list,
    "cache_salt": str,
    "tiers": list,
    "tier": str,
    "expires": datetime,
} | dict.fromkeys(_LIMITS, int)
_EXAMPLE_OF_TIME = "2027-01-31T00:00:00Z"
_HEADER = """\
# API keys of a Tandem router (router.keys_file), by their SHA-256; read again when it changes.
# `tandem keys add NAME --file FILE` writes a new one.

[keys]
"""


def read_keys(path: Path) -> tuple[KeyRecord, ...]:
    """The keys in the file ``path``, in its order.

    Raises:
        ConfigError: it cannot be read, or what it says cannot be.
    """
    return parse_keys(_read(path), str(path))


def parse_keys(text: str, source: str) -> tuple[KeyRecord, ...]:
    """The keys that ``text``, of ``source``, describes.

    Raises:
        ConfigError: names the field and the fix.
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ConfigError(FIELD, source, f"no valid TOML: {error}", "mend that line") from error
    unknown = [name for name in table if name != "keys"]
    keys = table.get("keys")
    if unknown or not isinstance(keys, Mapping):
        problem = f"has {unknown[0]!r} at its top" if unknown else "has no table [keys]"
        raise ConfigError(FIELD, source, problem, "a table [keys.NAME] for each key")
    records = tuple(_record(name, fields) for name, fields in keys.items())
    if len(records) > MAX_KEYS:
        raise ConfigError(FIELD, source, f"has {len(records)} keys", f"at most {MAX_KEYS}")
    check_distinct(records)
    return records


def check_distinct(records: tuple[KeyRecord, ...]) -> None:
    """Refuse two keys of one name, and one key under two names.

    Raises:
        ConfigError: names both.
    """
    names: set[str] = set()
    owners: dict[str, str] = {}
    for record in records:
        if record.name in names:
            raise ConfigError("keys", record.name, "is the name of two keys", "two names")
        names.add(record.name)
        other = owners.setdefault(record.sha256, record.name)
        if other != record.name:
            problem = f"is the key of {other!r}, too"
            raise ConfigError(f"keys.{record.name}.sha256", "...", problem, "a key for each name")


def add_to_file(path: Path, record: KeyRecord) -> None:
    """Write ``record`` at the end of the file, which is made where there is none.

    Raises:
        ConfigError: the name is taken, or the file cannot be read or written.
    """
    text = _read(path) if path.exists() else _HEADER
    former = parse_keys(text, str(path))
    if any(record.name == other.name for other in former):
        fix = f"another name, or `tandem keys remove {record.name}` first"
        raise ConfigError("NAME", record.name, f"is in {path} already", fix)
    text = f"{text.rstrip()}\n\n{_table_of(record)}"
    _check_written(path, text, (*former, record))
    _write(path, text)


def remove_from_file(path: Path, name: str) -> None:
    """Take the key ``name`` out of the file.

    Raises:
        ConfigError: there is none, or the file cannot be read or written.
    """
    check_name(name, "NAME")
    text = _read(path)
    former = parse_keys(text, str(path))
    left = tuple(record for record in former if record.name != name)
    if len(left) == len(former):
        names = ", ".join(record.name for record in former) or "none: the file is empty"
        raise ConfigError("NAME", name, f"is not in {path}", f"one of {names}")
    text = _without_table(text, name)
    _check_written(path, text, left)
    _write(path, text)


def _record(name: str, fields: object) -> KeyRecord:
    where = f"keys.{name}"
    check_name(name)
    if not isinstance(fields, Mapping):
        raise ConfigError(where, "...", "is no table", f"[{where}] with sha256")
    for key, value in fields.items():
        expected = _TYPES.get(key)
        if expected is None:
            fix = f"one of {', '.join(_TYPES)}"
            raise ConfigError(f"{where}.{key}", "...", "unknown key", fix)
        if type(value) is not expected:
            found, fix = type(value).__name__, f"a value of type {expected.__name__}"
            if expected is datetime:
                fix = f"a date with a time and a zone, not quoted: {_EXAMPLE_OF_TIME}"
            raise ConfigError(f"{where}.{key}", "...", f"is a {found}", fix)
    for field in ("models", "tiers"):
        for item in fields.get(field, []):
            if not isinstance(item, str) or not item:
                fix = f"names of {field}, as strings"
                raise ConfigError(f"{where}.{field}", item, "is no name", fix)
    rights = fields.get("rights", [Right.INFERENCE.value])
    return KeyRecord(
        name=name,
        sha256=fields.get("sha256", ""),
        rights=frozenset(parse_right(right, f"{where}.rights") for right in rights),
        models=tuple(fields.get("models", [])),
        cache_salt=fields.get("cache_salt", ""),
        tiers=tuple(fields.get("tiers", [])),
        tier=fields.get("tier", ""),
        limits=KeyLimits(**{limit: fields.get(limit, 0) for limit in _LIMITS}),
        expires=fields.get("expires"),
    )


def _table_of(record: KeyRecord) -> str:
    lines = [f"[keys.{record.name}]", f'sha256 = "{record.sha256}"']
    if record.rights != {Right.INFERENCE}:
        rights = (right.value for right in Right if right in record.rights)
        lines.append(f"rights = [{', '.join(map(_quoted, rights))}]")
    if record.models:
        lines.append(f"models = [{', '.join(map(_quoted, record.models))}]")
    if record.cache_salt:
        lines.append(f'cache_salt = "{record.cache_salt}"')
    if record.tiers:
        lines.append(f"tiers = [{', '.join(map(_quoted, record.tiers))}]")
    if record.tier:
        lines.append(f"tier = {_quoted(record.tier)}")
    if record.expires is not None:
        lines.append(f"expires = {record.end}")
    limits = ((limit, getattr(record.limits, limit)) for limit in _LIMITS)
    lines += [f"{limit} = {value}" for limit, value in limits if value]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without_table(text: str, name: str) -> str:
    """``text`` without the lines from ``[keys.NAME]`` to the next table, comments there included.

    A ``[keys]`` stays, so that a file without any key is still one.
    """
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if re.match(r"\s*\[", line):
            inside = re.match(rf"\s*\[\s*keys\s*\.\s*[\"']?{name}[\"']?\s*\]", line) is not None
        if not inside:
            kept.append(line)
    found = "".join(kept)
    return found if re.search(r"^\s*\[\s*keys\b", found, re.MULTILINE) else f"{found}\n[keys]\n"


def _check_written(path: Path, text: str, wanted: tuple[KeyRecord, ...]) -> None:
    """Refuse to write what would be read as something else: a file in another form than ours."""
    try:
        is_right = parse_keys(text, str(path)) == wanted
    except ConfigError:
        is_right = False
    if not is_right:
        problem = "is not written as tables [keys.NAME]"
        raise ConfigError("--file", str(path), problem, "change it by hand")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
        fix = "a readable file; `tandem keys add NAME --file FILE` makes one"
        raise ConfigError(FIELD, str(path), problem, fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(FIELD, str(path), f"no UTF-8: {error}", "a text file") from error


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a router may read it at any moment."""
    target = path.resolve()  # a link stays one
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--file", str(path), problem, "a writable folder") from error
