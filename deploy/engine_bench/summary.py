"""What a person sees at the end of a measurement: a few lines and a table, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.engine_bench.report import say
from deploy.engine_bench.stages import BatchProfile, StageRow, format_table

_NUM_ROWS = 25


def show_prefill(report: Mapping[str, Any], *, trace: Path | None = None) -> None:
    """Show the rates and the longest stages; the whole table goes to ``trace``."""
    times, ttft = report["batch_ms"], report["ttft_ms"]
    say(f"{report['label']}")
    say(
        f"batch {times['median']:.3f} ms (p10 {times['p10']:.3f}, p90 {times['p90']:.3f}"
        f" of {times['count']})"
    )
    if ttft:
        say(f"first token of one prompt {ttft['median']:.3f} ms")
    _show_common(report, trace)


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


def _show_common(report: Mapping[str, Any], trace: Path | None) -> None:
    show_rates(report["rates"])
    for note in report["notes"]:
        say(f"note: {note}")
    if not report["profile"]:
        return
    fields = dict(report["profile"])
    fields["stages"] = [StageRow(**row) for row in fields["stages"]]
    profile = BatchProfile(**fields)
    say(format_table(profile, _NUM_ROWS))
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        title = f"{report['label']}\n{report['command']}\n"
        trace.write_text(title + format_table(profile) + "\n", encoding="utf-8")
