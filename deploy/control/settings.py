"""The configuration of a cluster that runs, as operations change it: in memory and in its files.

`config.toml` of the run directory is always what is wanted now. Processes read the file that their
instance was started with: after an apply a new one, so that an instance which dies before its turn
comes back as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

from deploy.checkpoint.model_folder import model_like
from deploy.checks.cluster import resolve_config
from deploy.errors import ClusterError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from runtime.config import ClusterConfig
from runtime.config.file import dump_config

MAIN_FILE = "config.toml"
_REVISION = re.compile(r"config-(\d+)\.toml")


def with_instances(config: ClusterConfig, role: Role, count: int) -> ClusterConfig:
    """``config`` with another number of instances of a worker role."""
    if role is Role.PREFILL:
        prefill = dataclasses.replace(config.prefill, instances=count)
        return dataclasses.replace(config, prefill=prefill)
    decode = dataclasses.replace(config.decode, instances=count)
    return dataclasses.replace(config, decode=decode)


def keep_size(fleet: Fleet, role: Role, count: int) -> None:
    """Note how many instances a role has, or is to have."""
    config = with_instances(fleet.context.config, role, max(1, count))
    fleet.context = dataclasses.replace(fleet.context, config=config)
    _write(fleet.context.config_path, config)
    _write(_folder(fleet) / MAIN_FILE, config)


def adopt(fleet: Fleet, config: ClusterConfig) -> None:
    """What starts from now on starts with ``config``; what runs keeps a file of its own."""
    folder = _folder(fleet)
    main = folder / MAIN_FILE
    number = max((number for number, _ in _revisions(folder)), default=0)
    for instance in fleet.instances:
        if instance.context.config_path == main:
            former = folder / f"config-{number + 1}.toml"
            _write(former, instance.context.config)
            instance.context = dataclasses.replace(instance.context, config_path=former)
    fleet.publish()
    path = folder / f"config-{number + 2}.toml"
    _write(path, config)
    _write(main, config)
    fleet.context = dataclasses.replace(fleet.context, config=config, config_path=path)


def forget_unused(fleet: Fleet) -> None:
    """Remove the files of configurations that nobody runs any more."""
    used = {one.context.config_path for one in fleet.instances} | {fleet.context.config_path}
    for _, path in _revisions(_folder(fleet)):
        if path not in used:
            with contextlib.suppress(OSError):
                path.unlink()


def resolved_like(wanted: ClusterConfig, running: ClusterConfig, folder: Path) -> ClusterConfig:
    """``wanted`` with the ports, certificates and names that it leaves to the cluster.

    ``folder`` is where the run keeps certificates of its own making.

    Raises:
        ConfigError: see ``resolve_config``; also another model of the hub.
    """
    router = dataclasses.replace(
        wanted.router,
        port=wanted.router.port or running.router.port,
        control_port=wanted.router.control_port or running.router.control_port,
    )
    tls = wanted.tls
    if tls.mode == "auto" and running.tls.ca and Path(running.tls.ca).parent == folder:
        tls = running.tls
    model = model_like(wanted.model, running.model)
    return resolve_config(dataclasses.replace(wanted, router=router, tls=tls, model=model))


def _folder(fleet: Fleet) -> Path:
    return fleet.context.config_path.parent


def _revisions(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.glob("config-*.toml"):
        if (match := _REVISION.fullmatch(path.name)) is not None:
            found.append((int(match[1]), path))
    return found


def _write(path: Path, config: ClusterConfig) -> None:
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text(dump_config(config), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ClusterError(
            f"cannot write {path} ({error.strerror}). Fix: make room there, then do it again"
        ) from error
