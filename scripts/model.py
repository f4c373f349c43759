"""Check the model of the hand-over in ``docs/model`` with spin: ``make model``.

    python scripts/model.py [NAME ...]

Every configuration is searched exhaustively. Those that hold must have no error; those with a seed,
which takes something away that the protocol rests on, must have one. The exit status is 1 if any
result is another one. It needs ``spin`` and ``gcc`` (on Debian: apt-get install spin gcc).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "docs" / "model" / "handover.pml"
MEMORY_MIB = 5500
"""More than any configuration takes; beyond it the search ends, and is not complete."""
MAX_DEPTH = 100_000
SUMMARY = re.compile(r"errors: (\d+)\s+(\d+) states, stored", re.DOTALL)
SECONDS = re.compile(r"elapsed time ([\d.]+) seconds")
MEMORY = re.compile(r"([\d.]+)\s+total actual memory usage")
ERROR = re.compile(r"^pan:1: (.+) \(at depth", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Sizes and faults of one search.

    Attributes:
        name: of the configuration; a seed's is its macro.
        sizes: macros of the model and their values.
        seed: the macro of what is taken away, so that an error must be found; "" for none.
        is_live: whether the search is for a run in which a request never ends, fair or not; else
            for one that breaks an assertion, or that stands still too early.
    """

    name: str
    sizes: dict[str, int]
    seed: str = ""
    is_live: bool = False

    @property
    def macros(self) -> list[str]:
        """As the preprocessor takes them."""
        flags = [name for name, is_on in (("LIVENESS", self.is_live), (self.seed, True)) if is_on]
        return [f"-D{name}={value}" for name, value in self.sizes.items()] + [
            f"-D{flag}" for flag in flags if flag
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What spin found.

    Attributes:
        num_errors: 0 or 1, as it ends with the first.
        num_states: different ones that it has seen.
        seconds: that the search took, without the compilation.
        memory_mib: that it used.
        is_complete: whether it has seen all there are, or an error.
        text: what it said.
    """

    num_errors: int
    num_states: int
    seconds: float
    memory_mib: float
    is_complete: bool
    text: str


ONE_CRASH = {"REQS": 1, "TRIES": 2}
BASES = {
    "contention": {
        "REQS": 2,
        "TRIES": 1,
        "PARTS": 2,
        "CLIENTS_LEAVE": 1,
        "LOST_CLOSINGS": 1,
        "REPEATED_CLOSINGS": 1,
    },
    "hasty": {"REQS": 2, "TRIES": 1, "HASTY": 1, "CLIENTS_LEAVE": 1, "MAY_FAIL": 1},
    "failed-post": {"REQS": 1, "TRIES": 3, "PARTS": 2, "FAILED_POSTS": 1},
    # The next ticket of a writer is issued while it is shut out, which may cost all attempts.
    "fence": {
        "REQS": 1,
        "TRIES": 2,
        "SETS": 2,
        "SLOTS": 2,
        "FAILED_POSTS": 1,
        "CLIENTS_LEAVE": 1,
        "MAY_FAIL": 1,
    },
    "prefill-killed": {**ONE_CRASH, "REQS": 2, "PREFILL_ENDS": 1},
    # With two requests it does not fit into the memory.
    "prefill-leaves": {**ONE_CRASH, "LEAVES": 1},
    "decode-killed": {**ONE_CRASH, "DECODE_ENDS": 1},
    "drain": {**ONE_CRASH, "DRAINS": 1, "DECODES": 2},
    "cuts": {"REQS": 1, "TRIES": 3, "TOKENS": 3, "CUT_RUNS": 1, "CUT_STREAMS": 1},
}
SEEDS = {
    "NO_FENCE": "prefill-killed",
    "REUSE_NONCE": "cuts",
    "NO_QUARANTINE": "contention",
    "NO_GENERATION": "fence",
    "UNHEARD_SENDERS": "prefill-leaves",
    "CANCELS_ARE_FINAL": "cuts",
    "NO_REPLAY": "cuts",
}
LIVE = {
    "ends-after-a-crash": {"REQS": 1, "TRIES": 2, "PREFILL_ENDS": 1},
    "ends-after-a-cut": {"REQS": 1, "TRIES": 2, "CUT_RUNS": 1},
}


def configurations() -> list[Configuration]:
    """All of them: what holds, what must be found, and what must end."""
    return [
        *(Configuration(name=name, sizes=sizes) for name, sizes in BASES.items()),
        *(Configuration(name=seed, sizes=BASES[base], seed=seed) for seed, base in SEEDS.items()),
        *(Configuration(name=name, sizes=sizes, is_live=True) for name, sizes in LIVE.items()),
    ]


def search(configuration: Configuration) -> Search:
    """Compile and run one configuration.

    Raises:
        RuntimeError: spin or the compiler refuses the model.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-model-") as folder:
        _run(["spin", *configuration.macros, "-a", str(MODEL)], folder)
        kind = [] if configuration.is_live else ["-DSAFETY"]
        # Not optimised: to compile it so takes longer than most searches.
        options = ["-O0", "-w", "-DCOLLAPSE", "-DVECTORSZ=4096"]
        limit = f"-DMEMLIM={MEMORY_MIB}"
        _run(["gcc", *options, limit, *kind, "-o", "pan", "pan.c"], folder)
        cycles = ["-a"] if configuration.is_live else []
        text = _run(["./pan", f"-m{MAX_DEPTH}", *cycles], folder)
    return read_search(text)


def read_search(text: str) -> Search:
    """What a verifier of spin printed.

    Raises:
        RuntimeError: there is no result in it.
    """
    summary = SUMMARY.search(text)
    if summary is None:
        raise RuntimeError(f"no result of spin in:\n{text}")
    num_errors = int(summary[1])
    seconds, memory = SECONDS.search(text), MEMORY.search(text)
    is_cut = "Search not completed" in text or "max search depth too small" in text
    return Search(
        num_errors=num_errors,
        num_states=int(summary[2]),
        seconds=float(seconds[1]) if seconds else 0.0,
        memory_mib=float(memory[1]) if memory else 0.0,
        is_complete=num_errors > 0 or not is_cut,
        text=text,
    )


def is_as_expected(configuration: Configuration, found: Search) -> bool:
    """An error where one was seeded; elsewhere none, in all states."""
    return found.is_complete and found.num_errors == (1 if configuration.seed else 0)


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Run what is named, or all; the exit status."""
    everything = {one.name: one for one in configurations()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", choices=[[], *everything], metavar="NAME")
    names = parser.parse_args().names or list(everything)
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        print(f"error: no {' and no '.join(missing)}; on Debian: apt-get install spin gcc")
        return 2
    num_other = 0
    for name in names:
        configuration = everything[name]
        found = search(configuration)
        expected = is_as_expected(configuration, found)
        num_other += not expected
        print(
            f"{name:20} {'found' if found.num_errors else 'holds':6} {found.num_states:10,} states "
            f"{found.seconds:7.1f} s {found.memory_mib:7.0f} MiB"
            + ("" if expected else "  NOT AS EXPECTED"),
            *ERROR.findall(found.text),
            sep="\n    ",
            flush=True,
        )
        if not expected:
            print(found.text)
    return 1 if num_other else 0


if __name__ == "__main__":
    sys.exit(main())
