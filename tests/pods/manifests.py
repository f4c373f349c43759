"""The objects that were rendered, and how they name one another."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Manifest = Mapping[str, Any]
HOOK = "helm.sh/hook"


class ManifestError(Exception):
    """Kubernetes would not run this; says why."""


@dataclass(frozen=True, slots=True)
class Manifests:
    """All objects of one namespace, by kind and name."""

    objects: tuple[Manifest, ...]
    namespace: str = "default"
    _by_name: dict[tuple[str, str], Manifest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for one in self.objects:
            key = (one["kind"], one["metadata"]["name"])
            if key in self._by_name:
                raise ManifestError(f"there are two of {key}")
            self._by_name[key] = one

    @classmethod
    def of(cls, objects: Iterable[Manifest], namespace: str = "default") -> Manifests:
        """Of any number of objects; empty documents are left out."""
        return cls(tuple(one for one in objects if one), namespace)

    def of_kind(self, *kinds: str, hook: str = "") -> list[Manifest]:
        """Those of some kinds that belong to a hook of Helm's, or to none."""
        return [one for one in self.objects if one["kind"] in kinds and hook_of(one) == hook]

    def find(self, kind: str, name: str) -> Manifest | None:
        """One object, if it is there."""
        return self._by_name.get((kind, name))

    def data_of(self, kind: str, name: str) -> dict[str, bytes] | None:
        """What a ConfigMap or a Secret holds, by key; None: there is none."""
        found = self.find(kind, name)
        if found is None:
            return None
        if kind == "Secret":
            data = {k: base64.b64decode(v) for k, v in (found.get("data") or {}).items()}
            return data | {k: v.encode() for k, v in (found.get("stringData") or {}).items()}
        binary = {k: base64.b64decode(v) for k, v in (found.get("binaryData") or {}).items()}
        return binary | {k: v.encode() for k, v in (found.get("data") or {}).items()}


def hook_of(manifest: Manifest) -> str:
    """The hook of Helm's that an object belongs to; empty: none."""
    return str((manifest["metadata"].get("annotations") or {}).get(HOOK, ""))


def is_selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether labels have all that a selector asks for; an empty one selects nothing."""
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())
