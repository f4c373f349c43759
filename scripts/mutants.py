"""Remove one guard at a time, and see that the tests notice: ``make mutants``.

    python scripts/mutants.py [NAME ...]

``tests/mutants.toml`` lists the guards: a file, the text to replace (once in that file), what takes
its place, and tests of the gate that must fail with it. Each mutant is a copy of the tree of its
own; the checkout is not touched. The exit status is 1 if any mutant survives, if a guard is not
found any more, or if the named tests fail without the mutation too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTANTS = ROOT / "tests" / "mutants.toml"
FAILED = 1
"""pytest's status where tests ran and some failed; others mean that nothing was proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One guard, and what the code becomes without it."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def changed(self, text: str) -> str:
        """``text`` of the file without the guard.

        Raises:
            ValueError: the guard is not there, or more than once.
        """
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its text {count} times, not once")
        return text.replace(self.find, self.replace)


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """All of the file, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Mutant(
            name=name,
            file=table["file"],
            find=table["find"],
            replace=table["replace"],
            tests=tuple(table["tests"]),
        )
        for name, table in tables.items()
    ]


def run_tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status of pytest in ``tree``, and the first failure that it names."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "TANDEM_FIRST_EXAMPLE": "1"}
    result = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    return result.returncode, failed[0].split(" - ")[0] if failed else result.stdout[-400:]


def copy_tree(target: Path) -> None:
    """What git knows of the working tree, in ``target``."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def survives(mutant: Mutant, tree: Path) -> str:
    """Why the mutant counts as alive; empty: the tests fail with it, and pass without it."""
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    begun = time.monotonic()
    try:
        file.write_text(mutant.changed(text), encoding="utf-8")
        status, told = run_tests(tree, mutant.tests)
    finally:
        file.write_text(text, encoding="utf-8")
    print(f"{mutant.name:12} {time.monotonic() - begun:5.0f} s  {told}", flush=True)
    if status != FAILED:
        return f"the tests end with status {status} without the guard"
    status, told = run_tests(tree, mutant.tests)
    return f"the tests fail with the guard, too: {told}" if status else ""


def main() -> int:
    """Run all mutants, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of tests/mutants.toml; all without any")
    names = parser.parse_args().names
    mutants = [mutant for mutant in read_mutants() if not names or mutant.name in names]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder:
        copy_tree(Path(folder))
        for mutant in mutants:
            if problem := survives(mutant, Path(folder)):
                alive += 1
                print(f"{mutant.name}: ALIVE: {problem}", flush=True)
    print(f"mutants: {len(mutants) - alive} of {len(mutants)} turn the tests red")
    return 1 if alive or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
