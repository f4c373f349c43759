"""A pair at some load, with tiers and without: who met its targets, and what went through.

    python -m bench.tiers.command [--load 1.5] [--seconds 60] [--tpot-ms 50 70 0] [--json FILE]

Simulated (see the package). Prints a line for each tier, and the output tokens per second of both
runs. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.tiers.load import Mix, Outcome
from bench.tiers.model import Run, TierModel
from bench.tiers.shape import PairShape
from bench.tiers.virtual_loop import run_virtually
from runtime.config.tiers import TierSection
from runtime.tiers import Tiers

MIX = {"max": 0.2, "pro": 0.3, "base": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """What the requests of one tier had that came within the window."""

    tier: str
    num_requests: int
    num_ended: int
    """By the end of the run."""
    ttft_met: float
    """Share of the requests, those without an end counted as missed; so the next two."""
    tpot_met: float
    both_met: float
    ttft_p99_s: float
    """Of those that ended; so the next."""
    tpot_p99_s: float


def tiers_of(tpot_ms: Sequence[float]) -> tuple[TierSection, ...]:
    """Three tiers, as a provider of models sells them, with these targets for a token."""
    return (
        TierSection(name="max", order=0, ttft_ms=1000.0, tpot_ms=tpot_ms[0], share=0.5),
        TierSection(name="pro", order=1, ttft_ms=1500.0, tpot_ms=tpot_ms[1], share=0.3),
        TierSection(name="base", order=2, ttft_ms=2000.0, tpot_ms=tpot_ms[2], share=0.1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Requests that come between the two are counted, and tokens."""

    since: float
    until: float


def simulate(
    sections: Sequence[TierSection], *, load: float, window: Window, mix: Mix, has_tiers: bool
) -> Run:
    """One run at ``load`` times what the pair can do."""
    shape = PairShape()
    per_s = load * shape.capacity(mix.mean_prompt, mix.mean_output)
    arrivals = mix.arrivals(per_s, window.until)

    async def run() -> Run:
        model = TierModel(shape, Tiers(sections if has_tiers else ()))
        # Whoever comes last in the window has the time for his answer.
        return await model.run(arrivals, window.until + 40.0)

    return run_virtually(run())


def rows_of(
    run: Run, sections: Sequence[TierSection], *, load: float, window: Window, mix: Mix
) -> list[TierRow]:
    """A row for each tier."""
    shape = PairShape()
    per_s = load * shape.capacity(mix.mean_prompt, mix.mean_output)
    came = [a for a in mix.arrivals(per_s, window.until) if a.at_s >= window.since]
    rows = []
    for tier in sections:
        number = sum(arrival.tier == tier.name for arrival in came)
        ended = [
            outcome
            for outcome in run.outcomes
            if outcome.arrival.tier == tier.name and outcome.arrival.at_s >= window.since
        ]
        rows.append(_row(tier, number, ended))
    return rows


def _row(tier: TierSection, number: int, ended: Sequence[Outcome]) -> TierRow:
    met = [outcome.meets(tier) for outcome in ended]
    return TierRow(
        tier=tier.name,
        num_requests=number,
        num_ended=len(ended),
        ttft_met=round(sum(ttft for ttft, _ in met) / number, 4),
        tpot_met=round(sum(tpot for _, tpot in met) / number, 4),
        both_met=round(sum(ttft and tpot for ttft, tpot in met) / number, 4),
        ttft_p99_s=round(_quantile([outcome.ttft_s for outcome in ended], 0.99), 4),
        tpot_p99_s=round(_quantile([outcome.tpot_s for outcome in ended], 0.99), 4),
    )


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> None:
    """Run both, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=1.5, help="of what the pair can do")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the window")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds before it")
    parser.add_argument("--tpot-ms", type=float, nargs=3, default=[50.0, 70.0, 0.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mix = Mix(per_tier=MIX, seed=options.seed)
    window = Window(since=options.warm_up, until=options.warm_up + options.seconds)
    sections = tiers_of(options.tpot_ms)
    result: dict[str, object] = {"load": options.load, "tpot_ms": options.tpot_ms}
    speeds: dict[str, float] = {}
    for name, has_tiers in (("tiers", True), ("none", False)):
        run = simulate(sections, load=options.load, window=window, mix=mix, has_tiers=has_tiers)
        rows = rows_of(run, sections, load=options.load, window=window, mix=mix)
        speeds[name] = run.tokens_per_s(window.since, window.until)
        result[name] = {
            "output_tokens_per_s": round(speeds[name], 1),
            "num_preempted": run.num_preempted,
            "tiers": [asdict(row) for row in rows],
        }
        print(f"{name}: {speeds[name]:.0f} output tokens/s, {run.num_preempted} preemptions")
        for row in rows:
            print(f"  {row}")
    result["goodput_share"] = round(speeds["tiers"] / speeds["none"], 4)
    print(f"with tiers {result['goodput_share']} of the tokens without")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
