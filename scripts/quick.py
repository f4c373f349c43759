"""Run the tests of what a change touches, without the slow ones: ``make quick``.

A change is what differs from the commit where this branch left main, uncommitted and new files
included; on main itself, what is not committed, or else the last commit. A file of a package stands
for the tests of its folder: ``router/http/wire/sse.py`` for ``tests/router/http``. A file that many
stand on (``runtime/``, ``proto/``) stands for the quick tests of its users, too.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("tests/test_budgets.py", "tests/test_documents.py")
USERS = {
    "proto": ("tests/router/requests", "tests/prefill", "tests/decode"),
    "runtime": ("tests/runtime", "tests/router/pool", "tests/deploy"),
    "worker": ("tests/worker", "tests/prefill", "tests/decode"),
    "kv_transfer": ("tests/kv_transfer",),
    "experts": ("tests/experts", "tests/engine/experts", "tests/worker"),
    "grammar": ("tests/grammar", "tests/decode", "tests/router/text"),
}
SLOW = "not slow and not nightly and not soak and not gpu and not clients"


def changed_files() -> list[str]:
    """Paths of the change, from the root."""
    tracked = _git("diff", "--name-only", _base())
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*tracked, *new}) or _git("diff", "--name-only", "HEAD~1")


def tests_of(paths: Iterable[str], *, root: Path = ROOT) -> list[str]:  # noqa: PT028
    """The test files and folders that a change of ``paths`` asks for, nested ones left out."""
    wanted = set(ALWAYS)
    for path in paths:
        package, *_ = path.split("/")
        wanted.update(USERS.get(package, ()))
        wanted.add(_own_tests(Path(path), root))
    present = {test for test in wanted if test and (root / test).exists()}
    return sorted(
        test for test in present if not any(test.startswith(f"{other}/") for other in present)
    )


def _own_tests(path: Path, root: Path) -> str:
    """The nearest folder of tests that mirrors the file's; the file itself if it is a test."""
    if path.parts[0] == "tests":
        is_test = path.name.startswith("test_")
        return str(path) if is_test else str(path.parent) if len(path.parts) > 2 else ""
    for folder in path.parents:
        if folder.parts and (root / "tests" / folder).is_dir():
            return str("tests" / folder)
    return ""


def _base() -> str:
    branched = _git("merge-base", "HEAD", "main")
    head = _git("rev-parse", "HEAD")
    return branched[0] if branched and branched != head else "HEAD"


def _git(*arguments: str) -> list[str]:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return result.stdout.split()


def main() -> int:
    """Run them; pytest's exit status."""
    tests = tests_of(changed_files())
    print("quick:", *tests, flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", SLOW, *sys.argv[1:], *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
