"""The environment and the command line of a container, as the kubelet puts them together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.pods.manifests import Manifest, ManifestError, Manifests

_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_LABEL = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """What a pod may be told of itself."""

    name: str
    namespace: str
    uid: str
    ip: str
    host_ip: str
    node: str
    service_account: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def field(self, path: str) -> str:
        """What a fieldRef stands for.

        Raises:
            ManifestError: there is no such field.
        """
        if match := _LABEL.fullmatch(path):
            table = self.labels if match[1] == "labels" else self.annotations
            return str(table.get(match[2], ""))
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self.node,
            "spec.serviceAccountName": self.service_account,
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": self.host_ip,
        }
        if path not in known:
            raise ManifestError(f"fieldRef {path!r}: no such field of a pod")
        return known[path]


def environment_of(container: Manifest, facts: PodFacts, objects: Manifests) -> dict[str, str]:
    """The variables of a container.

    Raises:
        ManifestError: one refers to what is not there, and is not optional.
    """
    variables: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        variables |= _all_of(source, objects)
    for entry in container.get("env") or ():
        value = _value_of(entry, facts, objects)
        if value is not None:
            # What comes from elsewhere is taken as it is.
            is_literal = "valueFrom" not in entry
            variables[entry["name"]] = expand(value, variables) if is_literal else value
    return variables


def command_of(
    container: Manifest, variables: Mapping[str, str], image: Sequence[str]
) -> list[str]:
    """The command line; ``image`` is the entrypoint of its image."""
    command = [expand(part, variables) for part in container.get("command") or ()]
    arguments = [expand(str(part), variables) for part in container.get("args") or ()]
    return [*(command or image), *arguments]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with $(NAME) replaced; unknown names stay, and $$ is a dollar."""

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def _all_of(source: Mapping[str, Any], objects: Manifests) -> dict[str, str]:
    for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if reference := source.get(key):
            data = objects.data_of(kind, reference["name"])
            if data is None and not reference.get("optional"):
                raise ManifestError(f"{kind} {reference['name']!r} not found")
            prefix = source.get("prefix", "")
            return {prefix + name: value.decode() for name, value in (data or {}).items()}
    raise ManifestError(f"envFrom {source!r}: of what?")


def _value_of(entry: Mapping[str, Any], facts: PodFacts, objects: Manifests) -> str | None:
    source = entry.get("valueFrom")
    if source is None:
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise ManifestError(f"env {entry['name']}: {value!r} is no text")
        return value
    if "fieldRef" in source:
        return facts.field(source["fieldRef"]["fieldPath"])
    for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
        if reference := source.get(key):
            data = objects.data_of(kind, reference["name"]) or {}
            if reference["key"] in data:
                return data[reference["key"]].decode()
            if reference.get("optional"):
                return None
            wanted = f"key {reference['key']!r} of {kind} {reference['name']!r}"
            raise ManifestError(f"env {entry['name']}: {wanted} not found")
    raise ManifestError(f"env {entry['name']}: valueFrom {list(source)} is not known here")
