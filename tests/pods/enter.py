"""Becomes a container: ``enter.py FILE``, first process of new namespaces, with a JSON file of what
to be (``container.ContainerSpec``). Standard library only: it runs before there is an environment.

The root is an empty file system into which the parts of the image are bound, read-only; so a path
that the image would not have is not there, and where the root is read-only only volumes can be
written.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_SHM_BYTES = 64 * 2**20  # what container runtimes give to who asks for no volume there


def main() -> None:
    """Build the root, drop all rights, run the command."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    root = Path(spec["root"])
    socket.sethostname(spec["hostname"])
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    _build(root, spec)
    os.chdir(root)
    old = root / ".old"
    old.mkdir()
    _pivot_root(root, old)
    os.chdir("/")
    subprocess.run(["/usr/bin/umount", "-l", "/.old"], check=True)
    os.rmdir("/.old")
    if spec["read_only"]:
        _mount("-o", "remount,ro", "/")
    _drop_rights(spec)
    os.chdir(spec["folder"])
    os.environ["PATH"] = spec["environment"]["PATH"]
    os.execvpe(spec["command"][0], spec["command"], spec["environment"])


def _build(root: Path, spec: dict[str, object]) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for folder in ("proc", "sys", "dev", "etc", "tmp", "root", "run", "var"):
        (root / folder).mkdir()
    (root / "tmp").chmod(0o1777)
    _mount("-t", "proc", "proc", str(root / "proc"))
    _bind(Path("/sys"), root / "sys", read_only=True)
    for device in _DEVICES:
        (root / "dev" / device).touch()
        _mount("--bind", f"/dev/{device}", str(root / "dev" / device))
    (root / "dev" / "shm").mkdir()
    _mount("-t", "tmpfs", "-o", f"size={_SHM_BYTES},mode=1777", "shm", str(root / "dev" / "shm"))
    for name, text in spec["etc"].items():  # type: ignore[attr-defined]
        (root / "etc" / name).write_text(text)
    # Those of the image first: volumes may be inside of them.
    for mount in spec["mounts"]:  # type: ignore[attr-defined]
        _bind(Path(mount["source"]), root / mount["target"].lstrip("/"), mount["read_only"])


def _bind(source: Path, target: Path, read_only: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", str(source), str(target))
    if read_only:
        _mount("-o", "remount,bind,ro", str(target))


def _mount(*arguments: str) -> None:
    subprocess.run(["/usr/bin/mount", *arguments], check=True)


def _pivot_root(root: Path, old: Path) -> None:
    subprocess.run(["/usr/sbin/pivot_root", str(root), str(old)], check=True)


def _drop_rights(spec: dict[str, object]) -> None:
    user, group = int(spec["user"]), int(spec["group"])  # type: ignore[call-overload]
    os.setgroups(spec["groups"])  # type: ignore[arg-type]
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    if not spec["may_gain_rights"]:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        sys.exit(f"cannot start the container: {error}")
