"""The locks: what each environment installs, with versions and hashes, in ``requirements/``.

::

    python -m scripts.locks            # make locks: what pyproject.toml asks for
    python -m scripts.locks --upgrade  # make locks UPGRADE=1: at the newest versions
    python -m scripts.locks --check    # make locks-check: are they up to date, and installable

All is resolved from the public index alone: a wheel that only one machine has would hide what
others cannot install. Each lock is whole, with PyPI's build of PyTorch and its CUDA;
:func:`without_cuda` is for those who have a CPU build of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
_AT_ONCE = 8
"""Resolutions; each waits for the index more than it computes."""
_UNIVERSAL = ("--universal", f"--python-version={PYTHONS[0]}")
_HOPPER_HOST = ("--python-platform=x86_64-manylinux_2_39", "--python-version=3.12")
_INDEX_SETTINGS = re.compile(r"UV_(?!CACHE_DIR|DEFAULT_INDEX|HTTP|OFFLINE|SYSTEM_CERTS|NATIVE_TLS)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One environment: what of pyproject.toml it has, for which machines."""

    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    project: bool = True
    """Whether it has what the project depends on, and what builds it."""
    like: str = ""
    """The lock, an earlier one, whose versions it has of all but PyTorch, Triton and CUDA."""
    target: tuple[str, ...] = _UNIVERSAL


LOCKS = {
    "dev": Lock(extras=("dev",), groups=("cpu",)),
    "runtime": Lock(extras=("s3", "tracing"), groups=("cpu",), like="dev"),
    "gpu": Lock(extras=("gpu", "s3", "tracing"), like="dev", target=_HOPPER_HOST),
    "kernels": Lock(groups=("kernels",), project=False, like="dev"),
    "clients": Lock(groups=("clients",), project=False),
    "scan": Lock(groups=("scan",), project=False),
    "fuzz": Lock(groups=("fuzz",), like="dev"),
    "uv": Lock(groups=("uv",), project=False),
}


class LockError(Exception):
    """A lock is not what pyproject.toml asks for, or something cannot be resolved."""


def blocks(text: str) -> dict[str, str]:
    """The parts of a lock by package: the line of its version, its hashes and who asks for it."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            name = re.split(r"[=\[ ;]", line.strip())[0]
        if name:
            found[name] = found.get(name, "") + line
    return found


def pins(text: str) -> list[str]:
    """The lines of a lock that name a version, as ``name==version ; marker``."""
    lines = (line.removesuffix("\\").rstrip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith((" ", "#"))]


def without_cuda(text: str) -> str:
    """A lock without PyTorch and the libraries of CUDA that only PyPI's build of it asks for."""
    parts = blocks(text)
    askers = {name: set(_askers(part)) for name, part in parts.items()}
    of_cuda = {name for name in parts if name.startswith(("nvidia-", "cuda-"))}
    kept = parts.keys() - of_cuda - {"torch"}
    others = {asker for by in askers.values() for asker in by} - parts.keys()
    while more := {name for name in of_cuda - kept if askers[name] & (kept | others)}:
        kept |= more
    return "".join(part for name, part in parts.items() if name in kept)


def _askers(part: str) -> Iterator[str]:
    """Who asks for a package, from the comment beneath it."""
    for line in part.splitlines():
        asker = re.match(r" +#(?: via)? +(\S+)", line)
        if asker and asker[1] != "via":
            yield asker[1].split("[")[0]


def write(uv: str, *, upgrade: bool) -> None:
    """Write all locks."""
    FOLDER.mkdir(exist_ok=True)
    for name in LOCKS:
        text = _made(uv, name, upgrade=upgrade)
        _path(name).write_text(text, encoding="utf-8")
        print(f"requirements/{name}.txt: {len(pins(text))} packages")


def check(uv: str) -> None:
    """Whether the locks are what pyproject.toml asks for, and all that we promise resolves.

    Raises:
        LockError: with all that is not so.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(_AT_ONCE) as threads:
        _write_cpu_build(Path(folder))
        # These read the index; the others, then, what these have read of it.
        jobs = [threads.submit(_check_lock, uv, name) for name in LOCKS]
        jobs += [threads.submit(_check_resolves, uv, python) for python in PYTHONS]
        wait(jobs)
        for python in PYTHONS:
            jobs.append(threads.submit(_check_resolves, uv, python, cpu_build=folder))
            jobs += [threads.submit(_check_wheels, uv, python, name) for name in ("dev", "kernels")]
        wait(jobs)
    faults = []
    for job in jobs:
        try:
            print(job.result())
        except LockError as error:
            faults.append(str(error))
    if faults:
        raise LockError("\n".join(faults))


def _made(uv: str, name: str, *, upgrade: bool = False) -> str:
    """A lock made anew, with the versions that it and the one that it is like have already."""
    lock = LOCKS[name]
    known = {} if upgrade or not _path(name).exists() else blocks(_read(name))
    if lock.like:
        theirs = blocks(without_cuda(_read(lock.like)))
        known |= {key: part for key, part in theirs.items() if key != "triton"}
    options = [*lock.target, "--generate-hashes", "--custom-compile-command=make locks"]
    options += [f"--extra={extra}" for extra in lock.extras]
    options += [f"--group={group}" for group in lock.groups]
    if lock.project:
        options += ["pyproject.toml", "-"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / f"{name}.txt"
        output.write_text("".join(known.values()), encoding="utf-8")
        _compile(uv, *options, f"--output-file={output}", what=f"requirements/{name}.txt")
        return output.read_text(encoding="utf-8")


def _check_lock(uv: str, name: str) -> str:
    old, new = set(pins(_read(name))), set(pins(_made(uv, name)))
    if old != new:
        changes = [f"  -{each}" for each in sorted(old - new)]
        changes += [f"  +{each}" for each in sorted(new - old)]
        problem = f"requirements/{name}.txt is not what pyproject.toml asks for:"
        raise LockError("\n".join([problem, *changes, "Fix: make locks"]))
    return f"requirements/{name}.txt is what pyproject.toml asks for"


def _check_resolves(uv: str, python: str, *, cpu_build: str = "") -> str:
    """Whether the project resolves without a lock, alone or beside a CPU build in a folder."""
    title = f"tandem-serve[dev] on Python {python} "
    title += "and a CPU build of PyTorch" if cpu_build else "alone"
    options = [*_on_linux(python), "--extra=dev", "pyproject.toml"]
    options += [f"--find-links={cpu_build}", "--group=cpu"] if cpu_build else []
    found = pins(_compile(uv, *options, what=title, read=bool(cpu_build)))
    cuda = [pin for pin in found if pin.startswith(("nvidia-", "cuda-", "torch=="))]
    if cpu_build and not (len(cuda) == 1 and cuda[0].endswith("+cpu")):
        raise LockError(f"{title}: it comes with {', '.join(cuda)}")
    return f"{title}: {len(found)} packages"


def _check_wheels(uv: str, python: str, name: str) -> str:
    """Whether the index has a wheel of every package of a lock for this Python."""
    title = f"requirements/{name}.txt on Python {python}"
    options = (*_on_linux(python), "--no-deps", "--only-binary=:all:", str(_path(name)))
    found = pins(_compile(uv, *options, what=title, read=True))
    return f"{title}: {len(found)} wheels"


def _on_linux(python: str) -> tuple[str, ...]:
    return "--python-platform=linux", f"--python-version={python}"


def _compile(uv: str, *options: str, what: str, read: bool = False) -> str:
    """What ``uv pip compile`` says, with the public index and nothing of this machine's.

    Args:
        uv: the program
        options: of it
        what: is compiled, for who reads an error
        read: whether what uv has read of the index will do; if not, it is asked again

    Raises:
        LockError: with uv's reasons.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for more in (["--offline"], []) if read else ([],):
        done = subprocess.run(
            [uv, "pip", "compile", "--quiet", "--no-config", *more, *options],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if not _INDEX_SETTINGS.match(key)},
            input="\n".join(project["build-system"]["requires"]),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout
    raise LockError(f"{what}:\n{done.stderr.strip()}")


def _write_cpu_build(folder: Path) -> None:
    """What a CPU build of PyTorch says of itself, in place of an index of such builds."""
    version = (
        next(pin for pin in pins(_read("runtime")) if pin.startswith("torch==")).split("==")[1]
        + "+cpu"
    )
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _path(name: str) -> Path:
    return FOLDER / f"{name}.txt"


def _read(name: str) -> str:
    return _path(name).read_text(encoding="utf-8")


def main() -> int:
    """Write or check the locks; a line on stderr for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--upgrade", action="store_true", help="move to the newest versions")
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    uv = str(Path(sys.executable).parent / "uv")
    try:
        if args.check:
            check(uv)
        else:
            write(uv, upgrade=args.upgrade)
    except LockError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
