"""What a person sees at the end of a measurement: a few lines and a table, on stderr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.engine.report import say
from bench.engine.stages import BatchProfile, StageRow, format_table

_NUM_ROWS = 25
_TIMES = {
    "batch_ms": "batch",
    "step_ms": "step",
    "ttft_ms": "first token of one prompt",
    "idle_between_batches_ms": "device idle between batches",
    "idle_between_steps_ms": "device idle between steps",
}
_BOUNDS = {
    "data_sheet": "the data sheet's bound",
    "reached": "what published kernels reach",
}


def show(report: Mapping[str, Any], *, trace: Path | None = None) -> None:
    """Show times, rates, method and the longest stages; the whole table goes to ``trace``."""
    for line in summarise(report):
        say(line)
    if report["profile"]:
        _show_profile(report, trace)


def show_row(report: Mapping[str, Any]) -> None:
    """Show what fits into a table: times and rates."""
    for line in (*_tell_times(report), *tell_rates(report["rates"])):
        say(line)


def summarise(report: Mapping[str, Any]) -> list[str]:
    """The lines but for the table of stages."""
    bound = report["bound"]["why"]
    return [
        f"{report['benchmark']}: {report['label']}",
        *_tell_times(report),
        *tell_rates(report["rates"]),
        *([f"no share of a bound: {bound}"] if bound else []),
        *_tell_method(report),
        *(f"note: {note}" for note in report["notes"]),
    ]


def tell_rates(rates: Mapping[str, Any]) -> Iterator[str]:
    """One line for what ran, one for what it stands for."""
    for kind in ("as_run", "node"):
        rate = rates[kind]
        told = [
            f"{share:.1%} of {_BOUNDS[name]}"
            for name, share in (rate["share_of_bound"] or {}).items()
        ]
        of_bound = f"  {', '.join(told)}" if told else ""
        yield f"{kind:6} {rate['tokens_per_s']:12.1f} tok/s{of_bound}  [{rate['label']}]"


def _tell_times(report: Mapping[str, Any]) -> Iterator[str]:
    for name, what in _TIMES.items():
        times = report.get(name)
        if times:
            yield (
                f"{what} {times['p50']:.3f} ms"
                f" (p10 {times['p10']:.3f}, p90 {times['p90']:.3f} of {times['count']})"
            )
    experts, played = report.get("experts_ms"), report.get("played")
    if experts:
        yield f"experts of rank 0 {experts['gemms']:.3f} ms, {experts['rows']:.3f} for their rows"
    if played:
        yield (
            f"rank 0 gets {played['received_over_mean'][0]:.3f} times the mean rows, the busiest of"
            f" {played['whole_ranks']} {played['whole_busiest_over_mean']:.3f} with"
            f" {played['whole_redundant_experts']} redundant experts"
        )
    layers = report.get("layers_us")
    if layers:
        share = (layers["share_of_bound"] or {}).get("data_sheet")
        told = "" if share is None else f", {share:.1%} of {_BOUNDS['data_sheet']}"
        yield f"layer {layers['us_per_layer']:.1f} us{told}"


def _tell_method(report: Mapping[str, Any]) -> Iterator[str]:
    method = report["method"]
    yield (
        f"{method['num_steps']} steps in {method['seconds']:.1f} s after {method['warm_up_s']:g} s"
        f" of warm-up; temperature {method['temperature']:g}, top-p {method['top_p']:g}"
    )
    for end, seen in report["clocks"].items():
        if seen["gpus"] is None:
            yield f"clocks at the {end}: {seen['why']}"
        else:
            told = "; ".join(f"{gpu['sm_mhz']} MHz, {gpu['power_w']} W" for gpu in seen["gpus"])
            yield f"clocks at the {end}: {told}"


def _show_profile(report: Mapping[str, Any], trace: Path | None) -> None:
    fields = dict(report["profile"])
    fields["stages"] = [StageRow(**row) for row in fields["stages"]]
    profile = BatchProfile(**fields)
    say(format_table(profile, _NUM_ROWS))
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        title = f"{report['label']}\n{report['command']}\n"
        trace.write_text(title + format_table(profile) + "\n", encoding="utf-8")
