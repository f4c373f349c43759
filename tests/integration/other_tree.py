"""A second tree beside this one, which some processes of a cluster run: another version of it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from runtime.config import ClusterConfig
from runtime.version import WIRE
from tests.integration.cluster import Cluster
from tests.processes.forked import Process, start

ROOT = Path(__file__).parents[2]
VERSION = "9.9.9"
NEWER, UNNUMBERED, SAME = "newer", "unnumbered", "same"
"""Of another wire number; of none, as before there was one; of ours. All are of `VERSION`."""

_UNNUMBERED = """

def own_wire() -> common_pb2.Wire:
    return common_pb2.Wire()


def why_refused(peer: str, theirs: common_pb2.Wire) -> str:
    return ""
"""


def make_tree(folder: Path, kind: str) -> Path:
    """All packages as they are here, and `runtime` as ``kind`` has it."""
    for package in ROOT.iterdir():
        if (package / "__init__.py").exists() and package.name != "runtime":
            (folder / package.name).symlink_to(package)
    runtime = folder / "runtime"
    shutil.copytree(ROOT / "runtime", runtime, ignore=shutil.ignore_patterns("__pycache__"))
    if kind == NEWER:
        _replace(runtime / "version.py", f"WIRE: Final = {WIRE}", f"WIRE: Final = {WIRE + 1}")
    elif kind == UNNUMBERED:
        with (runtime / "wire.py").open("a") as file:
            file.write(_UNNUMBERED)
    told = folder / f"tandem_serve-{VERSION}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tandem-serve\nVersion: {VERSION}\n"
    )
    return folder


class TwoTrees(Cluster):
    """A cluster of which those that ``is_other`` chooses by name run another tree."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        *,
        kind: str,
        is_other: Callable[[str], bool],
        **options: Any,
    ) -> None:
        """As `Cluster`; ``kind`` is of the other tree, and ``is_other`` may change its mind."""
        super().__init__(config, folder, **options)
        self.is_other = is_other
        (folder / "tree").mkdir(parents=True)
        self._tree = make_tree(folder / "tree", kind)

    def start_process(
        self, name: str, command: list[str], environment: Mapping[str, str], log: BinaryIO
    ) -> Process:
        """In a new process where it is of the other tree: forks have imported this one."""
        if not self.is_other(name):
            return super().start_process(name, command, environment, log)
        # Safe: the folder that we are in has the other tree's packages, too.
        tree = {"PYTHONPATH": str(self._tree), "PYTHONSAFEPATH": "1"}
        return start(command, environment={**environment, **tree}, output=log, fresh=True)

    def replace_router(self, index: int) -> None:
        """End a router in order, and start it again, of whichever tree it now is."""
        process = self.processes.pop(f"router-{index}" if index else "router")
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        self.start_router(index)


def _replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file}: {old}"
    file.write_text(text.replace(old, new))
