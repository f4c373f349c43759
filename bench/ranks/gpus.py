"""Finding what is slow on ranks that really run: what recording costs, and what the judge finds.

    python -m bench.ranks.gpus --dp 4 --layers 24 --shard-of 8 --json FILE

Decode steps of one instance, a process a GPU, no Ray. In one run: steps with and without records in
turns; then one fault after another, each for 100 steps and some more, with what the router's judge
says of each 100 of them; then steps without a fault, in which it should say nothing. `--device cpu
--model-shape tiny` runs the same over gloo, where times mean little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from bench.engine.command import parse_range
from bench.engine.launcher import Job, RankPlace, launch
from bench.engine.machine import describe_machine
from bench.engine.options import Axis, DecodeOptions, Setup
from bench.engine.rank_model import RankModels, free_memory
from bench.engine.report import Report, say
from bench.engine.routing import RoutingTables
from bench.engine.session import describe_execution
from bench.ranks.detection import places_of
from bench.ranks.faults import (
    LiveFault,
    Place,
    captured_fault,
    faults_of,
    skewed,
    sleeper,
    spinning,
)
from bench.ranks.judged import Blocks, alarms_of, report_finding, show_looks
from bench.ranks.live import LiveRank, Stretch
from bench.ranks.quiet import beside_others, median_own_s, run_quiet, show_quiet
from engine.graphs.graph_runner import GraphRunner
from runtime.errors import ConfigError
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, STEPS_OF_BLOCK, Phase
from runtime.stragglers.slow_ranks import Finding

NO_FAULT = "none"
"""Asked for in place of faults: only the steps without one, however many seconds."""
WARM_UP_STEPS = 30
LEVELLING_STEPS = 304
STEPS_OF_WINDOW = STEPS_OF_BLOCK * BLOCKS_OF_WINDOW


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """What is asked for.

    Attributes:
        decode: model, ranks and requests.
        turns: pairs of stretches, without and with records.
        turn_s: seconds of a stretch of those.
        quiet_s: of steps without a fault.
        windows: of 100 steps that are looked at with each fault, 20 steps apart.
        usual_steps: without a fault before all faults, whose noise the judge knows then.
        faults: in order.
        level: whether ranks are made alike before them.
    """

    decode: DecodeOptions
    turns: int
    turn_s: float
    quiet_s: float
    windows: int
    usual_steps: int
    faults: tuple[LiveFault, ...]
    level: bool = False

    @property
    def num_steps(self) -> int:
        """Of a fault's stretch: the first follows none, and the last few are not told any more."""
        return STEPS_OF_WINDOW + (self.windows - 1) * STEPS_OF_BLOCK + 4


def run_live(options: LiveOptions, place: RankPlace) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    models = RankModels(place)
    rank = models.get(options.decode)
    if rank.waits is None:
        raise ConfigError("set", "decode.record_waits", "nothing is recorded", '"auto"')
    if rank.measured.config.num_moe_layers < 2:
        problem = "of one layer with experts nothing is told apart from the work between steps"
        raise ConfigError("layers", options.decode.setup.layers, problem, "more layers")
    live = LiveRank(options.decode, rank)
    with live.unrecorded():
        plain = live.capture()
        live.run(plain, num_steps=WARM_UP_STEPS, records=False)
    recorded = live.capture()
    say("ready", rank=place.rank)
    live.run(recorded, num_steps=WARM_UP_STEPS)
    costs = _compare(live, plain, recorded, options)
    plain.close()
    levelled = None
    if options.level:
        recorded, levelled = _level(live, recorded)
    healthy = live.run(recorded, num_steps=max(options.num_steps, options.usual_steps))
    work_s = _work_before_dispatch(healthy.blocks, rank.measured.config.num_moe_layers)
    say(f"a step takes {1e3 * healthy.median_s:.2f} ms", rank=place.rank)
    found = [
        _with_fault(live, recorded, fault, options, work_s=work_s, healthy=healthy)
        for fault in options.faults
    ]
    quiet = run_quiet(
        live,
        recorded,
        healthy.blocks,
        seconds=options.quiet_s,
        num_steps=options.num_steps,
    )
    report: Report = {
        "benchmark": "slow ranks",
        "label": rank.measured.label,
        "requests": list(options.decode.requests),
        "execution": describe_execution(rank.execution),
        "machine": describe_machine(options.decode.setup.device, place.world_size),
        "step_ms": 1e3 * healthy.median_s,
        "work_before_dispatch_us": 1e6 * work_s,
        "usual": _describe_blocks(healthy.blocks),
        "levelled_us": levelled,
        "recording": costs,
        "faults": found,
        "quiet": quiet,
    }
    recorded.close()
    live.close()
    models.close()
    return None if place.rank else report


def _level(live: LiveRank, runner: GraphRunner) -> tuple[GraphRunner, Sequence[float]]:
    """Slow ranks down whose work before a dispatch is shorter than the slowest rank's: cards of a
    host differ, and a fault of one or two is looked for among ranks that are alike.

    Returns:
        What runs steps from now on, and us a layer that each rank spins.
    """
    session = live.session
    place, num_layers = session.rank.place, session.rank.measured.config.num_moe_layers
    own_s = median_own_s(live.run(runner, num_steps=LEVELLING_STEPS).blocks)
    work_s = own_s[Phase.DISPATCH] / (num_layers - 1)
    missing_s = (work_s.max() - work_s).tolist()
    session.rank.routing.before = spinning(session.device, missing_s[place.rank])
    runner.close()
    say(
        "ranks spin for " + ", ".join(f"{1e6 * each:.1f}" for each in missing_s) + " us a layer",
        rank=place.rank,
    )
    return live.capture(), [1e6 * each for each in missing_s]


def _compare(
    live: LiveRank, plain: GraphRunner, recorded: GraphRunner, options: LiveOptions
) -> Report:
    """Run without and with records in turns; the second pair begins with records, and so on."""
    medians: dict[bool, list[float]] = {False: [], True: []}
    means: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(options.turns):
        for records in (False, True) if turn % 2 == 0 else (True, False):
            if records:
                stretch = live.run(recorded, num_steps=20, seconds=options.turn_s)
            else:
                with live.unrecorded():
                    stretch = live.run(plain, num_steps=20, seconds=options.turn_s, records=False)
            medians[records].append(stretch.median_s)
            means[records].append(float(np.mean(stretch.step_s)))
    each = [on / off - 1.0 for off, on in zip(medians[False], medians[True], strict=True)]
    return {
        "median_ms_off": [1e3 * value for value in medians[False]],
        "median_ms_on": [1e3 * value for value in medians[True]],
        "mean_ms_off": [1e3 * value for value in means[False]],
        "mean_ms_on": [1e3 * value for value in means[True]],
        "overhead_each_turn": each,
        "overhead": float(np.median(each)) if each else None,
    }


def _with_fault(
    live: LiveRank,
    recorded: GraphRunner,
    fault: LiveFault,
    options: LiveOptions,
    *,
    work_s: float,
    healthy: Stretch,
) -> Report:
    """Run with one fault from the first step on, and say what is found, and when."""
    session, tables = live.session, live.session.rank.routing.tables
    before = sleeper(fault, session.rank.place.rank, healthy.median_s)
    usual = _skew(live, fault, tables) if fault.rows else None
    with captured_fault(fault, session, work_s):
        runner = live.capture() if fault.is_captured else recorded
        if fault.is_captured:
            live.run(runner, num_steps=3)
        stretch = live.run(runner, num_steps=options.num_steps, between=before)
        if runner is not recorded:
            runner.close()
    if usual is not None and tables is not None:
        tables.redraw(usual)
    free_memory(session.device)
    windows = stretch.windows(healthy.blocks)
    say(f"{fault.name}: {show_looks(windows[:1])}", rank=session.rank.place.rank)
    return _describe_fault(fault, stretch, windows)


def _skew(live: LiveRank, fault: LiveFault, tables: RoutingTables | None) -> Tensor:
    """Let experts of one rank get more; return the tables of before."""
    if tables is None:
        raise ConfigError("faults", fault.name, "the router chooses experts", "leave it out")
    usual, rank = tables.draws, live.session.rank
    num_experts = rank.measured.config.n_routed_experts
    tables.redraw(skewed(usual, fault.ranks[0], rank.place.world_size, num_experts, fault.rows))
    return usual


def _describe_fault(
    fault: LiveFault, stretch: Stretch, windows: Sequence[Sequence[Finding]]
) -> Report:
    hits = [fault.places <= places_of(found) for found in windows]
    return {
        "name": fault.name,
        "expected": [[kind.value, rank, source] for kind, rank, source in _by_rank(fault)],
        "fault": {
            name: value for name, value in dataclasses.asdict(fault).items() if name != "kind"
        },
        "steps": len(stretch.step_s),
        "step_ms": 1e3 * stretch.median_s,
        "found_after_steps": (
            STEPS_OF_WINDOW + STEPS_OF_BLOCK * hits.index(True) if any(hits) else None
        ),
        "found_in_windows": [sum(hits), len(hits)],
        "found_by_window": hits,
        "other_alarms": alarms_of(windows, fault.places),
        "first_window": [report_finding(finding) for finding in windows[0]],
        "recorded": _describe_blocks(stretch.blocks),
    }


def _by_rank(fault: LiveFault) -> list[Place]:
    return sorted(fault.places, key=lambda place: place[1])


def _work_before_dispatch(blocks: Blocks, num_layers: int) -> float:
    """Return seconds that the median rank works before the dispatch of a layer, but the first."""
    own = [block.own_s[Phase.DISPATCH] for of_rank in blocks.values() for block in of_rank]
    return float(np.median(own)) / max(1, num_layers - 1)


def _describe_blocks(blocks: Blocks) -> Report:
    """Return medians over the blocks, in us of a step: own work by phase and rank, and waits."""
    own = np.median([[b.own_s for b in blocks[rank]] for rank in sorted(blocks)], axis=1)
    told = [[(b.waits_s, b.first_waits_s or b.waits_s) for b in blocks[r]] for r in sorted(blocks)]
    both = np.median(np.array(told), axis=1)  # [R, 2, P, R]
    waits, firsts = both[:, 0], both[:, 1]
    rows = np.mean([[b.num_rows for b in blocks[rank]] for rank in sorted(blocks)], axis=1)
    return {
        "own_us": {p.name.lower(): (1e6 * own[:, p]).round(1).tolist() for p in Phase},
        "waits_us": {p.name.lower(): (1e6 * waits[:, p]).round(1).tolist() for p in Phase},
        "first_us": {p.name.lower(): (1e6 * firsts[:, p]).round(1).tolist() for p in Phase},
        "rows": rows.round(1).tolist(),
        "own_beside_others": {
            p.name.lower(): beside_others(own.T)[p].round(4).tolist() for p in Phase
        },
    }


def show(report: Report) -> None:
    """Print the table."""
    costs, quiet = report["recording"], report["quiet"]
    assert isinstance(costs, dict)
    assert isinstance(quiet, dict)
    overhead = costs["overhead"]
    if overhead is not None:
        turns = ", ".join(f"{value:+.2%}" for value in costs["overhead_each_turn"])
        print(f"recording: {overhead:+.3%} of a median step (turns: {turns})")
    faults = report["faults"]
    assert isinstance(faults, list)
    print(f"{'fault':18s} {'expected':26s} {'after steps':>11s} {'windows':>8s} {'others':>6s}")
    for row in faults:
        expected = " ".join(
            f"{kind} {rank}" + (f"<-{source}" if source >= 0 else "")
            for kind, rank, source in row["expected"]
        )
        after = row["found_after_steps"]
        hits, count = row["found_in_windows"]
        print(
            f"{row['name']:18s} {expected:26s} {after or 'never':>11} {f'{hits}/{count}':>8s} "
            f"{len(row['other_alarms']):6d}"
        )
    show_quiet(quiet)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-shape", default="deepseek-v3")
    parser.add_argument("--dp", type=int, default=4, help="ranks; faults are of four")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shard-of", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=128, help="requests of each rank")
    parser.add_argument("--context-lens", default="1500-1660", metavar="N-M")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--turns", type=int, default=6, help="with and without records")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--quiet", type=float, default=30.0, help="seconds without a fault")
    parser.add_argument("--windows", type=int, default=5, help="looked at, of each fault")
    parser.add_argument(
        "--usual-steps", type=int, default=1200, help="before all faults, whose noise is known then"
    )
    parser.add_argument("--attention", type=float, default=0.05, help="share that is added")
    parser.add_argument("--rows", type=float, default=0.2, help="share that is added")
    parser.add_argument("--link-us", type=float, default=20.0, help="that are added")
    parser.add_argument("--faults", default="", help="names with commas, or none (default: all)")
    parser.add_argument(
        "--level", action="store_true", help="slow ranks down to the slowest before all of that"
    )
    parser.add_argument("--json", type=Path, help="where the report is written")
    return parser


def _parse() -> tuple[LiveOptions, Path | None]:
    arguments = _parser().parse_args()
    faults = faults_of(
        attention=arguments.attention, rows=arguments.rows, link_s=1e-6 * arguments.link_us
    )
    names = [name for name in arguments.faults.split(",") if name]
    unknown = set(names) - {fault.name for fault in faults} - {NO_FAULT}
    if unknown or arguments.dp < 4:
        known = ", ".join(fault.name for fault in faults)
        raise ConfigError(
            "faults", sorted(unknown), "are unknown, or there are too few ranks", known
        )
    setup = Setup(
        shape=arguments.model_shape,
        dp=arguments.dp,
        layers=arguments.layers,
        shard_of=arguments.shard_of,
        shard_axis=Axis.DP,
        device=arguments.device,
        settings=tuple(arguments.settings),
    )
    decode = DecodeOptions(
        setup=setup,
        requests=(arguments.batch,) * arguments.dp,
        context_lens=parse_range(arguments.context_lens, "context-lens"),
    )
    options = LiveOptions(
        decode=decode,
        turns=arguments.turns,
        turn_s=arguments.seconds,
        quiet_s=arguments.quiet,
        windows=arguments.windows,
        usual_steps=arguments.usual_steps,
        level=arguments.level,
        faults=tuple(fault for fault in faults if not names or fault.name in names),
    )
    return options, arguments.json


def main() -> None:
    """Measure, print a table, write the report where asked to."""
    options, path = _parse()
    setup = options.decode.setup
    report = launch(
        Job(run=run_live, options=options, world_size=setup.world_size, device=setup.device)
    )
    if report is None:
        return
    show(report)
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
