"""What processes hold during a long run: sampled, drawn, and its slope with a confidence interval.

`python -m tests.integration.soak_curves SAMPLES.jsonl PICTURE.png` draws; it needs matplotlib,
which nothing else here does: ``uv run --no-project --with matplotlib``, or any environment.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.integration.background import Background

if TYPE_CHECKING:
    from tests.integration.cluster import Cluster

EVERY_S = 5.0
NUM_BLOCKS = 12
STUDENT_95 = 2.228
"""Two-sided, of `NUM_BLOCKS` - 2 degrees of freedom."""
CURVES = ("rss_mib", "files", "threads", "blocks")
_RSS = re.compile(r"^Rss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One process at one time.

    Attributes:
        seconds: since the first sample.
        process: its name; a new one of the same name has another `pid`.
        rss_mib: memory, shared pages too: a share of these changes as others end.
        files: descriptors.
        threads: of the kernel.
        blocks: of its KV pool that are taken; requests in flight of a router.
    """

    seconds: float
    process: str
    pid: int
    rss_mib: float
    files: int
    threads: int
    blocks: int


class Sampler(Background):
    """Samples all processes of a cluster into a file, from a thread of its own."""

    def __init__(self, cluster: Cluster, path: Path) -> None:
        super().__init__("sampler")
        self._cluster = cluster
        self._path = path

    def _run(self) -> None:
        began = time.monotonic()
        with self._path.open("w", encoding="utf-8") as file:
            while not self._stop.wait(EVERY_S):
                for sample in self._take(time.monotonic() - began):
                    file.write(json.dumps(asdict(sample)) + "\n")
                file.flush()

    def _take(self, seconds: float) -> list[Sample]:
        held = _blocks_held(self._cluster)
        samples = []
        for name, process in list(self._cluster.processes.items()):
            proc = Path("/proc", str(process.pid))
            try:
                found = _RSS.search((proc / "smaps_rollup").read_text())
                files, threads = len(os.listdir(proc / "fd")), len(os.listdir(proc / "task"))
            except OSError:  # killed meanwhile
                continue
            if found is not None:
                samples.append(
                    Sample(
                        seconds=round(seconds, 1),
                        process=name,
                        pid=process.pid,
                        rss_mib=round(int(found[1]) / 1024, 2),
                        files=files,
                        threads=threads,
                        blocks=held.get(name, 0),
                    )
                )
        return samples


def _blocks_held(cluster: Cluster) -> dict[str, int]:
    status = cluster.status()
    if status is None:
        return {}
    held = {"router": int(status["num_requests_in_flight"])}
    for worker in status["workers"]:
        load = worker["load"]
        name = f"{worker['instance']}/{worker['rank']}"
        held[name] = load["num_total_blocks"] - load["num_free_blocks"]
    return held


def read_samples(path: Path) -> list[Sample]:
    """All samples of a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Sample(**json.loads(line)) for line in lines]


def of_the_whole_run(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Those of each process that lived from the first sample to the last."""
    by_process: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_process[sample.process, sample.pid].append(sample)
    last = max(sample.seconds for sample in samples)
    first = min(sample.seconds for sample in samples)
    return {
        name: some
        for (name, _), some in by_process.items()
        if some[0].seconds == first and some[-1].seconds == last
    }


def slope(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The slope by least squares, and half of its confidence interval of 95%.

    Neighbouring samples are alike, so it is fitted to the means of `NUM_BLOCKS` blocks of them.

    Raises:
        ValueError: fewer samples than blocks.
    """
    if len(times) < NUM_BLOCKS:
        raise ValueError(f"{len(times)} samples are too few for {NUM_BLOCKS} blocks")
    x = np.array([part.mean() for part in np.array_split(np.asarray(times), NUM_BLOCKS)])
    y = np.array([part.mean() for part in np.array_split(np.asarray(values), NUM_BLOCKS)])
    centred = x - x.mean()
    spread = float((centred**2).sum())
    found = float((centred * y).sum()) / spread
    rest = y - y.mean() - found * centred
    error = float(np.sqrt((rest**2).sum() / (NUM_BLOCKS - 2) / spread))
    return found, STUDENT_95 * error


def slopes_of_memory(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """MiB an hour and half of the confidence interval, of each process that was never killed.

    The first quarter, in which caches fill, does not count.
    """
    found = {}
    for name, some in of_the_whole_run(samples).items():
        late = some[len(some) // 4 :]
        per_s, half = slope([s.seconds for s in late], [s.rss_mib for s in late])
        found[name] = (3600 * per_s, 3600 * half)
    return found


def draw(samples: Sequence[Sample], picture: Path) -> None:
    """A curve of each process under the other, for memory, files, threads and blocks."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(len(CURVES), 1, sharex=True, figsize=(11, 12))
    names = sorted({sample.process for sample in samples})
    for axis, curve in zip(axes, CURVES, strict=True):
        for name in names:
            some = [sample for sample in samples if sample.process == name]
            axis.plot([s.seconds for s in some], [getattr(s, curve) for s in some], label=name)
        axis.set_ylabel(curve)
        axis.set_ylim(bottom=0)
    axes[0].legend(ncols=3, fontsize="small")
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    draw(read_samples(Path(sys.argv[1])), Path(sys.argv[2]))
