"""Fuzz targets by coverage: ``python -m tests.fuzz NAME|all SECONDS``, as ``make fuzz`` does.

Each target runs in a process of its own under Atheris, from its seeds and its corpus on. What a
target found is kept in its corpus: a few inputs that reach lines which no other one does, and an
input of a crash, which fails the test of targets until the parser is mended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGES = (
    "bench",
    "decode",
    "deploy",
    "engine",
    "experts",
    "grammar",
    "kv_transfer",
    "prefill",
    "router",
    "runtime",
)
ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 4096
"""Of an input."""
MAX_KEPT, MAX_KEPT_BYTES = 24, 512
"""Inputs of a corpus, and bytes of each of them."""
MAX_LOOKED_AT = 60
"""Inputs that may be kept: the shortest of those that were found."""
HANG_S = 25
MEMORY_MB = 2048
Step = tuple[str, int, int]
"""A file, and two lines that ran one behind the other."""
_STATS = re.compile(r"stat::number_of_executed_units:\s*(\d+)|cov: (\d+)")


def child(name: str, arguments: Sequence[str]) -> None:
    """Fuzz one target until libFuzzer ends this process."""
    import atheris

    with atheris.instrument_imports(include=list(PACKAGES)):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutate import mutated

    target = TARGETS[name]
    target.try_one(target.seeds[0])  # whatever is made at first use is no part of an input's time

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        found = mutated(data, target.words, seed, max_size) if seed % 4 else None
        return bytes(atheris.Mutate(data, max_size)) if found is None else found

    options: dict[str, Any] = {"custom_mutator": mutate} if target.is_json else {}
    atheris.Setup([name, *arguments], target.try_one, **options)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target in a process of its own, and keep what it found; whether nothing crashed."""
    from tests.fuzz.target import read_corpus, write_corpus
    from tests.fuzz.targets import TARGETS

    target, kept = TARGETS[name], read_corpus(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        inputs, crashes, words = (Path(place) / part for part in ("inputs", "crashes", "words"))
        inputs.mkdir()
        crashes.mkdir()
        for number, data in enumerate((*target.seeds, *kept)):
            (inputs / str(number)).write_bytes(data)
        words.write_text("".join(_dictionary_line(word) for word in target.words))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz", "--child", name, "0"),
                *(f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-timeout={HANG_S}"),
                *(f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={crashes}/"),
                # An empty dictionary ends libFuzzer at its start.
                *((f"-dict={words}",) if target.words else ()),
                *("-print_final_stats=1", str(inputs)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        said = done.stdout + done.stderr
        # Slow units are no crashes.
        found = [path.read_bytes() for path in crashes.iterdir() if "slow-unit" not in path.name]
        told = [each.group() for each in _STATS.finditer(said)]
        print(f"{name}: {' '.join(told[-1:] + told[-2:-1])}, {len(found)} crashes", flush=True)
        if found or done.returncode:
            print(done.stdout[-4000:], done.stderr[-1500:], flush=True)
        new = [path.read_bytes() for path in inputs.iterdir()]
        write_corpus(name, [*found, *kept_of(name, [*kept, *new])])
    return not found and not done.returncode


def _dictionary_line(word: str) -> str:
    """A word as libFuzzer's dictionaries have it."""
    return '"' + "".join(f"\\x{byte:02x}" for byte in word.encode()) + '"\n'


def kept_of(name: str, inputs: Sequence[bytes]) -> list[bytes]:
    """Few of ``inputs`` that go together where all of them go, and the seeds do not."""
    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    seen: set[Step] = set()
    for data in target.seeds:
        seen |= _steps_of(name, data)
    short = sorted({data for data in inputs if len(data) <= MAX_KEPT_BYTES}, key=len)[
        :MAX_LOOKED_AT
    ]
    left = {data: _steps_of(name, data) for data in short}
    kept: list[bytes] = []
    while len(kept) < MAX_KEPT and left:
        left = {data: new for data, steps in left.items() if (new := steps - seen)}
        best = max(left, key=lambda data: len(left[data]), default=None)
        if best is not None:
            kept.append(best)
            seen |= left.pop(best)
    return kept


def _steps_of(name: str, data: bytes) -> set[Step]:
    """From which line to which a target goes, in which file of ours, for one input."""
    from tests.fuzz.targets import TARGETS

    steps: set[Step] = set()
    ours = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(ours):
            return None
        before = frame.f_lineno

        def step(frame: FrameType, event: str, _: object) -> Any:
            nonlocal before
            steps.add((file, before, frame.f_lineno))
            before = frame.f_lineno
            return step

        return step

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        TARGETS[name].try_one(data)
    except Exception:
        return set()  # a crash, which is kept as such
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # as it is before the first call
    return steps


def main() -> int:
    """Fuzz one target or all of them, each for its share of the seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", help="a name, or all")
    parser.add_argument("seconds", type=int)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.child:
        child(args.target, rest)
        return 0
    from tests.fuzz.targets import TARGETS

    names = sorted(TARGETS) if args.target == "all" else [args.target]
    if args.target not in (*TARGETS, "all"):
        parser.error(f"{args.target}: no target. Fix: all, or one of {', '.join(sorted(TARGETS))}")
    share = max(1, args.seconds // len(names))
    crashed = [name for name in names if not fuzz(name, share)]
    if crashed:
        print(f"crashed: {', '.join(crashed)}; their inputs are in tests/fuzz/corpus")
    return 1 if crashed else 0


if __name__ == "__main__":
    sys.exit(main())
