"""The volumes of a pod, laid out as folders of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.pods.environment import PodFacts
from tests.pods.manifests import Manifest, ManifestError, Manifests

_FILE_MODE = 0o644
_GROUP_READS = 0o440


def lay_out(pod: Manifest, folder: Path, objects: Manifests, facts: PodFacts) -> dict[str, Path]:
    """The folder of each volume, by name. Claims are folders beside those of the pods.

    Raises:
        ManifestError: a volume is of what is not there.
    """
    group = (pod.get("securityContext") or {}).get("fsGroup")
    paths: dict[str, Path] = {}
    for volume in pod.get("volumes") or ():
        is_claim = "persistentVolumeClaim" in volume
        if is_claim:
            path = _claimed(volume["persistentVolumeClaim"], folder.parents[1], objects)
        else:
            (folder / volume["name"]).mkdir(parents=True)
            path = _fill(volume, folder / volume["name"], objects, facts)
        paths[volume["name"]] = path
        if group is not None and "hostPath" not in volume:
            # Who fills a claim may be at it just now, and writes as that group.
            files = () if is_claim else path.rglob("*")
            _give_to(path, files, int(group), writable=is_claim or "emptyDir" in volume)
    return paths


def _fill(volume: Mapping[str, Any], path: Path, objects: Manifests, facts: PodFacts) -> Path:
    if "emptyDir" in volume:
        path.chmod(0o777)
    elif "hostPath" in volume:
        return _host_folder(volume["hostPath"])
    elif "projected" in volume:
        mode = volume["projected"].get("defaultMode", _FILE_MODE)
        for source in volume["projected"]["sources"]:
            _project(source, path, objects, facts, mode)
    else:
        _project(volume, path, objects, facts, _FILE_MODE)
    return path


def _claimed(source: Mapping[str, Any], place: Path, objects: Manifests) -> Path:
    name = source["claimName"]
    if objects.find("PersistentVolumeClaim", name) is None:
        raise ManifestError(f"persistentvolumeclaim {name!r} not found")
    path = place / f"claim-{name}"
    path.mkdir(exist_ok=True)
    return path


def _host_folder(source: Mapping[str, Any]) -> Path:
    path = Path(source["path"])
    if source.get("type") == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise ManifestError(f"hostPath {path}: no such folder")
    return path


def _project(
    source: Mapping[str, Any], path: Path, objects: Manifests, facts: PodFacts, mode: int
) -> None:
    for key, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        if key in source:
            wanted = source[key]
            name = wanted.get("secretName") or wanted["name"]
            data = objects.data_of(kind, name)
            if data is None and not wanted.get("optional"):
                raise ManifestError(f"MountVolume.SetUp failed: {kind} {name!r} not found")
            files = _chosen(data or {}, wanted.get("items"), f"{kind} {name!r}")
            _write(path, files, wanted.get("defaultMode", mode))
            return
    if "downwardAPI" in source:
        items = source["downwardAPI"]["items"]
        files = {one["path"]: facts.field(one["fieldRef"]["fieldPath"]).encode() for one in items}
        _write(path, files, mode)
        return
    raise ManifestError(f"volume {source}: not known here")


def _chosen(
    data: Mapping[str, bytes], items: Sequence[Mapping[str, Any]] | None, what: str
) -> dict[str, bytes]:
    if items is None:
        return dict(data)
    for item in items:
        if item["key"] not in data:
            raise ManifestError(f"{what} has no key {item['key']!r}")
    return {item["path"]: data[item["key"]] for item in items}


def _write(path: Path, files: Mapping[str, bytes], mode: int) -> None:
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)


def _give_to(path: Path, files: Iterable[Path], group: int, *, writable: bool) -> None:
    """As fsGroup: the group owns it all and may read it, or write what is the pod's own."""
    os.chown(path, -1, group)
    if writable:
        path.chmod(0o2777)
    for file in files:
        os.chown(file, -1, group)
        if file.is_file():
            file.chmod(file.stat().st_mode | _GROUP_READS)
