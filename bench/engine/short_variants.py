"""A short step of prefill, with its parts switched on one after another: which of them pay.

Run ``python -m bench.engine.short_variants --json OUT.jsonl`` on a Hopper GPU with the `gpu` extra;
with ``--layers 24`` on one of 80 GB. Each variant is ``bench prefill --shard-of 8 --prompt-len 64
--cached-len 65536 --batch-tokens 64``, in a model of its own, some 20 s after the first, which
compiles. ``issue_us`` is how long the host takes to issue the graphs of a step.

Nothing here is for servers: what is switched off by a patch has no switch there.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.engine.launcher import Job, RankPlace, launch
from bench.engine.options import PrefillOptions, Setup
from bench.engine.prefill import run_prefill
from bench.engine.rank_model import RankModels
from bench.engine.report import append_line, say
from engine.boot import open_execution
from engine.graphs import suffix_graphs
from engine.graphs.capture import Pieces
from engine.side_stream import SideRule

Patch = tuple[Any, str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A step that is run in one way.

    Attributes:
        name: of the row.
        fuses: whether queries and values pass the latent space by two kernels.
        beside: whether the shared expert has a stream of its own.
        in_halves: whether its second half waits for the routed experts.
        dependent: whether kernels are launched while the one before runs.
        pieces: layers behind which a graph ends.
    """

    name: str
    fuses: bool = True
    beside: bool = True
    in_halves: bool = False
    dependent: bool = True
    pieces: tuple[int, ...] = suffix_graphs.FIRST_PIECES

    @property
    def settings(self) -> tuple[str, ...]:
        """Fields of the section."""
        return (
            f"prefill.overlap_shared_expert={'true' if self.beside else 'false'}",
            f"prefill.dependent_launches={'on' if self.dependent else 'off'}",
        )

    def patches(self) -> list[Patch]:
        """What has no field."""

        def rule(*, max_tokens: int | None, in_halves: bool) -> SideRule:
            return SideRule(max_tokens=max_tokens, in_halves=self.in_halves)

        found: list[Patch] = [
            (suffix_graphs, "FIRST_PIECES", self.pieces),
            (open_execution, "SideRule", rule),
        ]
        if not self.fuses:
            from engine.kernels.fused import absorb  # late: not every machine has Triton

            found.append((absorb, "takes", lambda weight: False))
        return found


_NONE: Final = Variant(name="as before", fuses=False, beside=False, dependent=False, pieces=())
VARIANTS: Final = (
    _NONE,
    dataclasses.replace(_NONE, name="+ fused", fuses=True),
    Variant(name="+ beside, in halves", in_halves=True, dependent=False, pieces=()),
    Variant(name="+ beside, whole", dependent=False, pieces=()),
    Variant(name="+ dependent", pieces=()),
    Variant(name="+ pieces: all", pieces=(0, 4)),
    Variant(name="all, one more piece", pieces=(0, 2, 12)),
    Variant(name="all, in halves", in_halves=True),
    dataclasses.replace(_NONE, name="as before, again"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        layers: of the model; 0 for all.
        seconds: of steps back to back.
        only: parts of the names of variants; none for all.
        lines_to: a line of JSON for each; None for none.
        shape: of the model.
        device: another one than "cuda" has nothing to compare, and shows that this runs.
        cached_len: tokens before the prompt.
    """

    shape: str = "deepseek-v3"
    device: str = "cuda"
    cached_len: int = 65536
    layers: int = 0
    seconds: float = 4.0
    only: tuple[str, ...] = ()
    lines_to: Path | None = None


@contextmanager
def applied(patches: list[Patch]) -> Iterator[None]:
    """Replace names in this block."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def measure(options: Options, place: RankPlace) -> list[dict[str, Any]]:
    """Measure every variant; a line each."""
    lines = []
    for variant in VARIANTS:
        if options.only and not any(part in variant.name for part in options.only):
            continue
        lines.append(_measure_one(variant, options, place))
        if options.lines_to is not None:
            append_line(lines[-1], options.lines_to)
    return lines


def _measure_one(variant: Variant, options: Options, place: RankPlace) -> dict[str, Any]:
    issues: list[float] = []
    replay = Pieces.replay

    def timed_replay(pieces: Pieces) -> None:
        start = time.perf_counter()
        replay(pieces)
        issues.append(time.perf_counter() - start)

    setup = Setup(
        shape=options.shape,
        device=options.device,
        shard_of=8,
        layers=options.layers,
        seconds=options.seconds,
        warm_up_s=2.0,
        profile=False,
        settings=variant.settings,
    )
    row = PrefillOptions(setup=setup, prompt_len=64, cached_len=options.cached_len, batch_tokens=64)
    models = RankModels(place)
    with applied([*variant.patches(), (Pieces, "replay", timed_replay)]):
        report = run_prefill(row, models)
        models.close()
    assert report is not None
    line = {
        "variant": dataclasses.asdict(variant),
        "ttft_ms": report["ttft_ms"],
        "batch_ms": report["batch_ms"],
        "issue_us": 1e6 * statistics.median(issues) if issues else None,
        **{name: report[name] for name in ("execution", "machine", "clocks", "options")},
    }
    say(_summary(line))
    return line


def _summary(line: dict[str, Any]) -> str:
    name, issued = line["variant"]["name"], line["issue_us"]
    ttft, batch = line["ttft_ms"]["p50"], line["batch_ms"]["p50"]
    told = "called" if issued is None else f"issued in {issued:.0f} us"
    return f"{name:24} first token {ttft:7.2f} ms, back to back {batch:7.2f} ms, {told}"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="Variants of a short step of prefill.")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of steps back to back")
    parser.add_argument("--only", nargs="*", default=[], help="variants with this in their names")
    parser.add_argument("--json", type=Path, help="where a line for each is added")
    arguments = parser.parse_args()
    options = Options(
        layers=arguments.layers,
        seconds=arguments.seconds,
        only=tuple(arguments.only),
        lines_to=arguments.json,
    )
    lines = launch(Job(run=measure, options=options, world_size=1, device=options.device))
    print("\n".join(map(_summary, lines or [])))


if __name__ == "__main__":
    main()
