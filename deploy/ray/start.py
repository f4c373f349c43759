"""Starts a Ray of our own on this machine, again and again where the machine is too busy for it.

It ends with the controller, or, where the cluster is to outlive that, is started by ``ray start``
as processes of their own. Ray waits 30 s for its own parts and can be told no other time.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import ClusterError
from deploy.running.sweep import kill_processes, ray_folder, ray_temp_dir
from runtime.logging import get_logger

if TYPE_CHECKING:
    from deploy.ray.settings import RaySettings

logger = get_logger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least: nothing of ours goes through it.
_HEAD_TIMEOUT_S = 120.0
_LATE = ("timed out", "timeout", "time out")
"""What Ray says, whatever it raises, where a part of it did not start in time."""
KEPT_LOGS = "ray"
"""Folder for the logs of a Ray that did not start, below those of the run."""


def start_own_ray(ray: Any, settings: RaySettings, tell: Callable[[str], None]) -> None:
    """Start it, and connect the module ``ray``.

    Args:
        ray: the module.
        settings: of the Ray.
        tell: hears that it takes another try.

    Raises:
        ClusterError: it cannot start, or has not started within ``settings.start_timeout_s``; where
            its logs are.
    """
    began = time.monotonic()
    number = 1
    while True:
        _make_folder(settings)
        try:
            _start(ray, settings)
        except Exception as error:  # Ray raises bare ones
            waited_s = time.monotonic() - began
            logger.exception("Ray did not start, try %d", number)
            kept = _clear_away(ray, settings)
            if not _is_late(error) or waited_s >= settings.start_timeout_s:
                raise ClusterError(_describe(error, waited_s, kept)) from None
        else:
            return
        number += 1
        tell(f"waits for Ray, which did not start in {waited_s:.0f} s: try {number}")


def _make_folder(settings: RaySettings) -> None:
    # Ray sets the mode of its own folder, and of all below, to 0777.
    ray_folder(settings.run_id).mkdir(mode=0o700, exist_ok=True)
    ray_temp_dir(settings.run_id).mkdir()


def _start(ray: Any, settings: RaySettings) -> None:
    if settings.outlives_us:
        settings.join(ray, _start_head(settings))
        return
    ray.init(
        address="local",
        namespace=settings.namespace,
        num_cpus=settings.num_slots,
        num_gpus=settings.num_devices,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
        _temp_dir=str(ray_temp_dir(settings.run_id)),
    )


def _start_head(settings: RaySettings) -> str:
    """Start Ray's daemons as processes that go on without us; where they are reached."""
    folder = ray_temp_dir(settings.run_id)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
    command += [f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    command += [f"--num-cpus={settings.num_slots}", f"--num-gpus={settings.num_devices}"]
    command += [f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    log = folder / "start.log"
    with log.open("wb") as output:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=_HEAD_TIMEOUT_S,
            check=False,
        ).returncode
    if status != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise RuntimeError(" ".join(said) or f"`ray start` ended with status {status}")
    return (folder / "ray_current_cluster").read_text(encoding="utf-8").strip()


def _clear_away(ray: Any, settings: RaySettings) -> Path | None:
    """End what has started, so that the next try finds nothing; the folder with its logs."""
    ray.shutdown()
    kill_processes(settings.run_id)
    folder, kept = ray_temp_dir(settings.run_id), None
    if settings.log_dir:
        kept = Path(settings.log_dir) / KEPT_LOGS
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for log in (*folder.glob("session_*/logs/*.*"), *folder.glob("start.log")):
            if log.is_file() and not log.is_symlink():
                shutil.copyfile(log, kept / log.name)
    shutil.rmtree(folder, ignore_errors=True)
    return kept


def _is_late(error: Exception) -> bool:
    said = str(error).lower()
    late = isinstance(error, TimeoutError | subprocess.TimeoutExpired)
    return late or any(word in said for word in _LATE)


def _describe(error: Exception, waited_s: float, kept: Path | None) -> str:
    where = f"; its logs are in {kept}" if kept else ""
    if _is_late(error):
        return (
            f"Ray has not started on this machine within {waited_s:.0f} s{where}. Fix: fewer other "
            "processes beside it, or a longer --timeout; `tandem router` and `tandem worker` need "
            "no Ray"
        )
    said = " ".join(str(error).split()) or type(error).__name__
    fix = "mend that, or go without Ray: `tandem router` and `tandem worker`"
    return f"Ray does not start on this machine: {said}{where}. Fix: {fix}"
