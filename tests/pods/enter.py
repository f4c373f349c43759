"""Makes a container: ``enter.py FILE``, with a JSON file of what to be (``ContainerPlan.write``).

Its child is the first process of new namespaces; it ends as its child does. Standard library only:
it runs before there is an environment.

The root is an empty file system into which the parts of the image are bound, read-only; so a path
that the image would not have is not there, and where the root is read-only only volumes can be
written.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000  # mount, UTS, IPC, PID
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_SHM_BYTES = 64 * 2**20  # what container runtimes give to who asks for no volume there


def main() -> None:
    """Make the namespaces, and wait for the end of what is in them."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    _call("unshare", _NEW_NAMESPACES)
    pid = os.fork()
    if pid == 0:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            _become(spec)
        except (OSError, subprocess.SubprocessError, KeyError) as error:
            sys.exit(f"cannot start the container: {error}")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        # Some are ignored by Python; who waits for us reads the number only.
        sys.exit(128 + os.WTERMSIG(status))
    sys.exit(os.WEXITSTATUS(status))


def _become(spec: dict[str, Any]) -> None:
    """Build the root, drop all rights, run the command."""
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


def _build(root: Path, spec: dict[str, Any]) -> None:
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
    if spec["etc_of_image"]:
        shutil.copytree(spec["etc_of_image"], root / "etc", symlinks=True, dirs_exist_ok=True)
    for name, text in spec["etc"].items():
        # Who is who is the image's to say.
        if not (spec["etc_of_image"] and name in ("passwd", "group")):
            (root / "etc" / name).unlink(missing_ok=True)
            (root / "etc" / name).write_text(text)
    # Those of the image first: volumes may be inside of them.
    for mount in spec["mounts"]:
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


def _drop_rights(spec: dict[str, Any]) -> None:
    user, group = int(spec["user"]), int(spec["group"])
    os.setgroups(spec["groups"])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    if not spec["may_gain_rights"]:
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments} failed")


if __name__ == "__main__":
    main()
