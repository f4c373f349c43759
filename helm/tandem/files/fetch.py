"""Brings a checkpoint to a folder, or waits until it is there.

    python fetch.py fetch SOURCE FOLDER
    python fetch.py wait SOURCE FOLDER

SOURCE is ORG/NAME[@REVISION] of Hugging Face's hub, which `tandem download` fetches, or a folder as
fsspec names it (s3://bucket/folder). Who fetches holds a lock beside the folder: of the pods of a
node one fetches, and the others find it done. A file in the folder says of what it is whole.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHOLE, BEGUN = ".tandem-whole", ".tandem-begun"
"""Files in the folder with the source that it is of, or that was begun."""
POLL_S = 2.0
SAY_EVERY_S = 60.0


def main(arguments: list[str]) -> int:
    """Fetch or wait; 0 when the checkpoint is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["fetch", "wait"])
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    if given.work == "wait":
        wait(given.source, given.folder)
        return 0
    try:
        with lock(given.folder):
            return fetch(given.source, given.folder)
    except PermissionError as error:
        say(f"{error}: the user {os.getuid()} may not write there. Fix: give it the folder")
    except Exception as error:  # a protocol's package raises what it likes
        say(f"{given.source} was not fetched: {type(error).__name__}: {error}")
    return 1


def say(text: str) -> None:
    """To the pod's log, at once."""
    print(text, flush=True)


def is_whole(source: str, folder: Path) -> bool:
    """Whether the folder holds all of this source."""
    return read(folder / WHOLE) == source


def read(file: Path) -> str:
    """Its text; empty: there is no such file."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""


def wait(source: str, folder: Path) -> None:
    """Return when somebody has fetched it."""
    said = -SAY_EVERY_S
    while not is_whole(source, folder):
        if time.monotonic() - said >= SAY_EVERY_S:
            say(f"{source} is not in {folder} yet: its Job tells how far it is")
            said = time.monotonic()
        time.sleep(POLL_S)
    say(f"{source} is in {folder}")


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Held by one process of all pods that see this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another pod fetches to {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch(source: str, folder: Path) -> int:
    """Bring what is not there yet; the exit status."""
    if is_whole(source, folder):
        say(f"{source} is in {folder}")
        return 0
    (folder / WHOLE).unlink(missing_ok=True)
    begun = read(folder / BEGUN)
    if begun not in ("", source):
        say(f"{begun} is removed from {folder}")
        empty(folder)
    may_go_on = begun == source
    write(folder / BEGUN, source)
    if "://" in source:
        status = copy(source, folder, may_go_on=may_go_on)
    else:
        status = subprocess.run(
            ["tandem", "download", source, "--to", str(folder)], check=False
        ).returncode
    if status == 0:
        write(folder / WHOLE, source)
        say(f"{source} is in {folder}")
    return status


def empty(folder: Path) -> None:
    """Remove what another source has left: files of two checkpoints would be read as one."""
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def write(file: Path, text: str) -> None:
    """All of it or nothing."""
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)


def copy(source: str, folder: Path, *, may_go_on: bool) -> int:
    """Copy the files of a folder that fsspec knows; those that are whole already stay."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(source.rstrip("/"))
    except (ImportError, ValueError) as error:
        say(f"{source}: {error}. Fix: an image with that package in model.download.image")
        return 1
    found: dict[str, dict[str, Any]] = files.find(root, detail=True)
    if not found:
        say(f"{source}: there are no files. Fix: a folder that holds a checkpoint")
        return 1
    wanted = {path: folder / path[len(root) :].lstrip("/") for path in found}
    left = {
        path: target
        for path, target in wanted.items()
        if not (may_go_on and target.exists() and target.stat().st_size == found[path]["size"])
    }
    num_bytes = sum(found[path]["size"] for path in left)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        say(f"{folder}: {num_bytes} bytes are to come and {free} are free. Fix: a larger volume")
        return 1
    for number, (path, target) in enumerate(sorted(left.items()), 1):
        size = found[path]["size"]
        say(f"{number} of {len(left)}: {target.name}, {size} bytes")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        files.get_file(path, str(part))
        if part.stat().st_size != size:
            say(f"{path}: {part.stat().st_size} of {size} bytes came. It is tried again")
            return 1
        part.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
