"""Writes what the Helm chart has from elsewhere in this tree; ``--check`` only says what differs.

    python scripts/chart_files.py [--check]

Helm reads nothing outside a chart, so dashboards and alerts are copied into it. The schema of
``config`` and ``router.models`` in ``values.schema.json`` is asked of the configuration itself:
names and types of the fields, and the choices and limits that a field's own refusal tells.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from router.models_file import MAX_MODELS, ModelEntry  # noqa: E402
from runtime.config import ClusterConfig  # noqa: E402
from runtime.config.file import parse_config  # noqa: E402
from runtime.errors import ConfigError  # noqa: E402

CHART = ROOT / "helm" / "tandem"
SCHEMA = CHART / "values.schema.json"
COPIES = (
    ("deploy/grafana", "*.json", "files/grafana"),
    ("deploy/prometheus", "alerts.yaml", "files/prometheus"),
)
CHARTS_OWN = {
    "cluster": {
        "name", "host", "advertise", "secret", "previous_secret", "run_dir", "ray_address",
    },
    "tls": {"mode", "cert", "key", "ca", "mutual", "http_mutual"},
    "model": {"path"},
    "router": {
        "instances", "host", "keys_file", "models_file", "allow_anonymous", "port", "control_port",
    },
    "prefill": {"instances"},
    "decode": {"instances"},
}  # fmt: skip
"""Fields that follow from other values of the chart. Clients' certificates (``tls.http_mutual``)
are not among these values: probes have none."""
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}
WORDS = ("auto", "default")
"""That stand in place of a number."""
IMPOSSIBLE = {str: "no such value", int: -(10**12), float: -1e12}


def config_schema() -> dict[str, object]:
    """The JSON schema of what ``config`` may hold."""
    sections = {}
    for name, section_type in get_type_hints(ClusterConfig).items():
        if get_origin(section_type) is tuple:
            sections[name] = _list_of(name, get_args(section_type)[0])
            continue
        hints = get_type_hints(section_type)
        own = CHARTS_OWN.get(name, set())
        fields = [item.name for item in dataclasses.fields(section_type) if item.name not in own]
        if fields:
            sections[name] = _closed(
                {field: _field(hints[field], partial(_refusal, name, field)) for field in fields}
            )
    return _closed(sections)


def models_schema() -> dict[str, object]:
    """The JSON schema of what ``router.models`` may hold: the file of models, by name."""
    kinds = get_type_hints(ModelEntry)
    fields: dict[str, object] = {
        name: _field(kind, partial(_refusal_of_model, name))
        for name, kind in kinds.items()
        if kind in TYPES and name not in ("name", "path")
    }
    # The file is in a folder of the chart's, from which no path can start.
    fields["path"] = {"type": "string", "pattern": "^/."}
    fields["aliases"] = {"type": "array", "items": {"type": "string", "minLength": 1}}
    return {
        "type": "object",
        "maxProperties": MAX_MODELS,
        "propertyNames": {"minLength": 1},
        "additionalProperties": {**_closed(fields), "required": ["path"]},
    }


def _list_of(name: str, table_type: type[Any]) -> dict[str, object]:
    """A list of tables, of which each has a name."""
    hints = get_type_hints(table_type)
    kinds = {
        field: {"type": TYPES[kind], **({} if kind in (str, bool) else {"minimum": 0})}
        for field, kind in hints.items()
    }
    return {"type": "array", "items": {**_closed(kinds), "required": ["name"]}}


def _closed(properties: dict[str, Any]) -> dict[str, object]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _field(kind: type, refusal_of: Callable[[object], ConfigError | None]) -> dict[str, object]:
    kinds = get_args(kind)
    if kinds:
        words = [word for word in WORDS if refusal_of(word) is None]
        numbers = [_field(one, refusal_of) for one in kinds if one is not str]
        return {"anyOf": [*numbers, {"enum": words}]}
    schema: dict[str, object] = {"type": TYPES[kind]}
    refusal = refusal_of(IMPOSSIBLE.get(kind))
    if refusal is None:
        return schema
    if kind is str and refusal.problem == "unknown value":
        return {"enum": refusal.fix.removeprefix("one of ").split(", ")}
    least = re.fullmatch(r"(\S+) or more", refusal.fix)
    if least:
        zero = refusal_of(kind(0))
        # Some take 0 as "choose it", if only with a GPU.
        is_choice = zero is not None and not zero.problem.startswith("is below")
        schema["minimum"] = kind(0) if is_choice else kind(float(least[1]))
    return schema


def _refusal(section: str, name: str, value: object) -> ConfigError | None:
    """What the configuration says of ``value``; None where that is of something else."""
    if value is None:
        return None
    try:
        parse_config({section: {name: value}})
    except ConfigError as error:
        return error if error.path == f"{section}.{name}" else None
    return None


def _refusal_of_model(name: str, value: object) -> ConfigError | None:
    """What a model of the file says of ``value``."""
    fields: dict[str, Any] = {"name": "x", "path": "/x", name: value}
    try:
        ModelEntry(**fields)
    except ConfigError as error:
        return error
    return None


def wanted_files() -> dict[Path, str]:
    """What the generated files of the chart have to hold."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["definitions"]["config"] = config_schema()
    schema["definitions"]["models"] = models_schema()
    files = {SCHEMA: json.dumps(schema, indent=2) + "\n"}
    for folder, pattern, target in COPIES:
        for source in sorted((ROOT / folder).glob(pattern)):
            files[CHART / target / source.name] = source.read_text(encoding="utf-8")
    return files


def stale_files() -> list[Path]:
    """Files that differ from what they have to be, and copies of what is gone."""
    wanted = wanted_files()
    stale = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for _, pattern, target in COPIES:
        stale += [path for path in sorted((CHART / target).glob(pattern)) if path not in wanted]
    return stale


def main(arguments: list[str]) -> int:
    """Write them, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where files differ")
    given = parser.parse_args(arguments)
    stale, wanted = stale_files(), wanted_files()
    for path in stale:
        print(f"{'differs' if given.check else 'writing'}: {path.relative_to(ROOT)}")
        if given.check:
            continue
        if path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
