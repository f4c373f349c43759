"""Whether what changed asks for a check that the gate can do without: ``scripts/touched.py NAME``.

A change is what differs from the last commit that the check passed on, which ``tests/nightly.toml``
says, or from ``TANDEM_BASE`` where a pipeline names the commit that it merges into. Exit status 0:
run it. Where the base is not known here, the check is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAST = ROOT / "tests" / "nightly.toml"
COMMON = (
    "pyproject.toml",
    "requirements/",
    "Makefile",
    ".ci/",
    "scripts/",
    "tests/conftest.py",
)
PATHS: Mapping[str, tuple[str, ...]] = {
    "kernels": (
        *COMMON,
        *(
            f"{root}engine/{folder}/"
            for root in ("", "tests/")
            for folder in (
                "attention", "formats", "kernels", "ops", "parallel/nvlink", "sampling",
            )
        ),
        "bench/tuner/",
        "tests/bench/tuner/",
    ),
    "clients": (
        *COMMON, "proto/", "router/http/", "router/text/", "grammar/", "tests/clients/",
    ),
    "pods": ("Makefile", ".ci/", "deploy/docker/", "helm/", "tests/pods/"),
}  # fmt: skip
"""Beginnings of paths, by check."""


def asks_for(name: str, changed: Iterable[str] | None) -> bool:
    """Whether the check is asked for; ``changed``: paths from the root, None where unknown."""
    return changed is None or any(path.startswith(PATHS[name]) for path in changed)


def changed_files(base: str) -> list[str] | None:
    """What differs from ``base`` in the working tree, new files too; None: no such commit."""
    tracked = _git("diff", "--name-only", base, "--")
    new = _git("ls-files", "--others", "--exclude-standard")
    return None if tracked is None or new is None else sorted({*tracked, *new})


def base_commit(name: str, path: Path = LAST) -> str:
    """What a change is compared with for a check; empty: not known."""
    given = os.environ.get("TANDEM_BASE", "")
    if given or not path.exists():
        return given
    passed = tomllib.loads(path.read_text(encoding="utf-8")).get(name, {})
    return str(passed.get("commit", ""))


def _git(*arguments: str) -> list[str] | None:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.splitlines() if result.returncode == 0 else None


def main() -> int:
    """Say whether, and since when."""
    if len(sys.argv) != 2 or sys.argv[1] not in PATHS:
        print(f"usage: scripts/touched.py {'|'.join(PATHS)}", file=sys.stderr)
        return 2
    name = sys.argv[1]
    base = base_commit(name)
    asked = asks_for(name, changed_files(base) if base else None)
    since = f"since {base[:12]}" if base else "the commit that it passed on last is not known"
    print(f"{name}: {'run' if asked else 'left out, nothing of theirs changed'} ({since})")
    return 0 if asked else 1


if __name__ == "__main__":
    sys.exit(main())
