"""What a person sees at the end of a measurement: a few lines and a table, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.engine_bench.report import say
from deploy.engine_bench.stages import BatchProfile, StageRow, format_table

_NUM_ROWS = 25
_TIMES = {
    "batch_ms": "batch",
    "step_ms": "step",
    "ttft_ms": "first token of one prompt",
    "idle_between_batches_ms": "device idle between batches",
    "idle_between_steps_ms": "device idle between steps",
}


def show(report: Mapping[str, Any], *, trace: Path | None = None) -> None:
    """Show times, rates and the longest stages; the whole table goes to ``trace``."""
    say(f"{report['benchmark']}: {report['label']}")
    for name, what in _TIMES.items():
        times = report.get(name)
        if times:
            say(
                f"{what} {times['median']:.3f} ms"
                f" (p10 {times['p10']:.3f}, p90 {times['p90']:.3f} of {times['count']})"
            )
    layers = report.get("layers_us")
    if layers:
        share = layers["share_of_bound"]["data_sheet"]
        say(f"layer {layers['us_per_layer']:.1f} us, {share:.1%} of the data sheet's bound")
    show_rates(report["rates"])
    for note in report["notes"]:
        say(f"note: {note}")
    if report["profile"]:
        _show_profile(report, trace)


def show_rates(rates: Mapping[str, Any]) -> None:
    """One line for what ran, one for what it stands for."""
    for kind in ("as_run", "node"):
        rate = rates[kind]
        share = rate["share_of_bound"]
        of_bound = (
            f"  {share['data_sheet']:.1%} of the data sheet's bound, {share['reached']:.1%} of"
            " what published kernels reach"
            if share
            else ""
        )
        say(f"{kind:6} {rate['tokens_per_s']:12.1f} tok/s{of_bound}  [{rate['label']}]")


def _show_profile(report: Mapping[str, Any], trace: Path | None) -> None:
    fields = dict(report["profile"])
    fields["stages"] = [StageRow(**row) for row in fields["stages"]]
    profile = BatchProfile(**fields)
    say(format_table(profile, _NUM_ROWS))
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        title = f"{report['label']}\n{report['command']}\n"
        trace.write_text(title + format_table(profile) + "\n", encoding="utf-8")
