"""One container as processes of this machine: its start, what is run inside, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from runtime.process import dying_with_us
from tests.pods.manifests import Manifest, ManifestError

REPOSITORY = Path(__file__).resolve().parents[2]
BUNDLED_MODEL = REPOSITORY / "deploy" / "models" / "tandem-python"
IMAGE_BIN = "/opt/tandem/bin"
IMAGE_MODEL = "/opt/tandem/models/tandem-python"
IMAGE_USER = 10001
OF_A_POD = ("dev", "etc", "proc", "run", "sys", "tmp", "var")
"""Folders of a root that are made for each container."""
_PYTHON = """\
#!/bin/sh
exec {python} "$@"
"""
_TANDEM = """\
#!{python}
import sys
from deploy.cli import main
sys.exit(main())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a container runs: the image itself, or what stands for it.

    Attributes:
        entrypoint: run where a container names no command.
        environment: of every container.
        mounts: what of this machine is where in the root, read-only.
        etc: a folder whose files are those of /etc, but for the pod's own; empty: there are none.
    """

    entrypoint: tuple[str, ...]
    environment: Mapping[str, str]
    mounts: tuple[tuple[str, str], ...]
    etc: str = ""

    @classmethod
    def here(cls, folder: Path) -> Image:
        """The image that ``TANDEM_IMAGE`` names (`tests.images.build`), or else this tree."""
        built = os.environ.get("TANDEM_IMAGE")
        return cls.of_build(Path(built)) if built else cls.of_this_tree(folder)

    @classmethod
    def of_build(cls, folder: Path) -> Image:
        """What was built into ``folder``."""
        root = (folder / "root").resolve()
        config = json.loads((folder / "image.json").read_text())
        parts = [one for one in sorted(root.iterdir()) if one.is_dir() and not one.is_symlink()]
        return cls(
            entrypoint=(*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())),
            environment=dict(line.split("=", 1) for line in config["Env"]),
            mounts=tuple((str(one), f"/{one.name}") for one in parts if one.name not in OF_A_POD),
            etc=str(root / "etc"),
        )

    @classmethod
    def of_this_tree(cls, folder: Path) -> Image:
        """``folder`` is for the commands of the image."""
        folder.mkdir(parents=True, exist_ok=True)
        # A link to an environment's Python would be one without the environment's packages.
        for name, text in (("python", _PYTHON), ("tandem", _TANDEM)):
            (folder / name).write_text(text.format(python=sys.executable))
            (folder / name).chmod(0o755)
        # An environment may be a link to another place.
        environment = {sys.prefix, str(Path(sys.prefix).resolve())}
        own = {"/usr", *environment, sys.base_prefix, str(REPOSITORY)}
        # A folder inside another one comes with it.
        roots = [one for one in sorted(own) if not any(one.startswith(f"{o}/") for o in own)]
        mounts = [*((one, one) for one in roots), (str(folder), IMAGE_BIN)]
        mounts += [(str(BUNDLED_MODEL), IMAGE_MODEL), ("/etc/ssl", "/etc/ssl")]
        return cls(
            entrypoint=("tandem",),
            environment={
                "PATH": f"{IMAGE_BIN}:/usr/bin:/bin",
                "PYTHONPATH": str(REPOSITORY),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            mounts=tuple(mounts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """Everything that starts a container once more.

    Attributes:
        name: of the container.
        command: what it runs.
        environment: complete.
        pause_pid: a process in the pod's network namespace.
        hostname: of the pod.
        etc: files of /etc that are the pod's own.
        etc_of_image: a folder with the others; empty: there are none.
        mounts: as ``enter.py`` has them.
        security: the pod's and the container's securityContext together.
        working_dir: where it starts.
        folder: of this machine, for its log and its root.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    pause_pid: int
    hostname: str
    etc: Mapping[str, str]
    etc_of_image: str
    mounts: tuple[Mapping[str, Any], ...]
    security: Manifest
    working_dir: str
    folder: Path

    @property
    def user(self) -> int:
        """Who it runs as.

        Raises:
            ManifestError: root, which it must not be.
        """
        user = int(self.security.get("runAsUser", IMAGE_USER))
        if self.security.get("runAsNonRoot") and user == 0:
            raise ManifestError("container has runAsNonRoot and image will run as root")
        return user

    @property
    def log_path(self) -> Path:
        """What all its lives have said."""
        return self.folder / "log"

    def write(self) -> Path:
        """The file for ``enter.py``."""
        root = self.folder / "root"
        root.mkdir(parents=True, exist_ok=True)
        group = int(self.security.get("runAsGroup", self.user))
        groups = [int(one) for one in self.security.get("supplementalGroups", ())]
        if "fsGroup" in self.security:
            groups.append(int(self.security["fsGroup"]))
        spec = {
            "root": str(root),
            "hostname": self.hostname,
            "command": self.command,
            "environment": dict(self.environment),
            "etc": dict(self.etc),
            "etc_of_image": self.etc_of_image,
            "mounts": list(self.mounts),
            "read_only": bool(self.security.get("readOnlyRootFilesystem")),
            "may_gain_rights": bool(self.security.get("allowPrivilegeEscalation", True)),
            "user": self.user,
            "group": group,
            "groups": groups,
            "folder": self.working_dir,
        }
        path = self.folder / "spec.json"
        path.write_text(json.dumps(spec))
        return path


class Container:
    """One life of a container."""

    def __init__(self, plan: ContainerPlan, process: asyncio.subprocess.Process) -> None:
        """``start`` makes one."""
        self.plan = plan
        self._process = process
        self._ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, plan: ContainerPlan) -> Container:
        """Start it; it dies with the thread that does this."""
        file = plan.write()
        enter = Path(__file__).with_name("enter.py")
        command = [
            *("nsenter", f"--net=/proc/{plan.pause_pid}/ns/net", "--"),
            *(sys.executable, "-I", "-S", str(enter), str(file)),
        ]
        with plan.log_path.open("ab") as log:
            return cls(plan, await _spawn(command, log))

    @property
    def has_ended(self) -> bool:
        """Whether this life is over."""
        return self._ended.done()

    @property
    def exit_status(self) -> int:
        """As the kubelet shows it: 128 + N after signal N."""
        status = self._ended.result()
        return status if status >= 0 else 128 - status

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        await asyncio.shield(self._ended)
        return self.exit_status

    async def run_inside(self, command_inside: Sequence[str], timeout_s: float) -> int:
        """The exit status of a command beside the container's; 124 when it took too long."""
        pid = self._first_pid()
        if pid is None:
            return 1
        environment = [f"{name}={value}" for name, value in self.plan.environment.items()]
        inside = ("--mount", "--pid", "--net", "--uts", "--ipc", "--root", "--wd")
        user = str(self.plan.user)
        command = ["nsenter", "-t", str(pid), *inside, "-S", user, "-G", user, "--"]
        command += ["/usr/bin/env", "-i", *environment, *command_inside]
        with self.plan.log_path.open("ab") as log:
            process = await _spawn(command, log)
        try:
            # Not `wait_for`, which until Python 3.12 loses a cancel that meets the process's end.
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError:
            return 124
        finally:
            await _end(process)

    def signal(self, number: int) -> None:
        """Tell its first process."""
        pid = self._first_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(pid, number)

    async def kill(self) -> None:
        """End all that is in it."""
        while not self.has_ended:
            # It may still be on its way into its namespaces.
            self.signal(signal.SIGKILL)
            if self._first_pid() is None:
                await _end(self._process)
            await asyncio.wait({self._ended}, timeout=0.1)

    def tail(self, num_lines: int = 15) -> str:
        """The end of its log."""
        lines = self.plan.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-num_lines:])

    def _first_pid(self) -> int | None:
        """Of the container's first process, seen from here; the child of ``enter.py``."""
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children and not self.has_ended else None


async def _spawn(command: Sequence[str], log: IO[bytes]) -> asyncio.subprocess.Process:
    """A process that dies with this thread, and at once where this is cancelled."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *dying_with_us(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={},
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _end(await starting)
        raise


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            # Not `Process.kill`, which may reap it under the one that waits for it.
            os.kill(process.pid, signal.SIGKILL)
        await process.wait()
