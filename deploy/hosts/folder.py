"""What processes of a run need on a host that has no file of ours: laid there, and taken away.

Nothing of it is shared by hosts: configuration and certificates come with the spec of a process,
which has a folder of its own; logs lie beside, and outlive the run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from deploy.errors import ClusterError
from deploy.plan import RUN_ID_VARIABLE, ProcessSpec
from deploy.state import run_dir_of

_MARK = "run"


def host_folder(cluster_name: str, run_dir: str, host: str) -> Path:
    """The folder of cluster ``cluster_name`` on ``host``, this machine; made if it is not there.

    Several hosts may see one file system, so each has a folder of its own.

    Raises:
        ClusterError: it cannot be made.
    """
    folder = run_dir_of(cluster_name, run_dir).path / "hosts" / host
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise ClusterError(
            f"cannot use {folder} on host {host} for logs ({error.strerror}); set cluster.run_dir "
            "to a folder that its user may write to on every host"
        ) from error
    return folder


def lay_files(spec: ProcessSpec, own: Mapping[str, str] | None = None) -> None:
    """Write the files of ``spec``, and ``own`` ones that did not travel with it, readable for this
    user only; the first of a run takes away the logs of the run before.

    Raises:
        OSError: they cannot be written.
    """
    if not spec.folder:
        return
    folder = Path(spec.folder)
    _begin_run(folder.parent, spec.env[RUN_ID_VARIABLE])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in {**spec.files, **(own or {})}.items():
        path = folder / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)


def remove_files(spec: ProcessSpec) -> None:
    """Take away what ``lay_files`` wrote; logs stay."""
    if spec.folder:
        shutil.rmtree(spec.folder, ignore_errors=True)


def _begin_run(folder: Path, run_id: str) -> None:
    """Ranks of one host start at the same time: only the first of them may find another's mark."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / _MARK).open("a+", encoding="utf-8") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        mark.seek(0)
        if mark.read() == run_id:
            return
        for log in (folder / "logs").glob("*.log"):
            log.unlink(missing_ok=True)
        mark.truncate(0)
        mark.write(run_id)
