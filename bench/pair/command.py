"""The arguments of ``tandem bench pair``, and what a person sees at its end."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.engine.report import Report

_HELP: Mapping[str, tuple[type, object, str]] = {
    "layers": (int, 0, "of the model (default: all)"),
    "prefill-tp": (int, 1, "ranks of the prefill instance"),
    "decode-dp": (int, 1, "ranks of the decode instance"),
    "prompt-len": (int, 1024, "tokens of each prompt"),
    "output-len": (int, 128, "tokens of each answer"),
    "decode-len": (int, 0, "tokens of an answer for decode alone (default: four answers at most)"),
    "batch": (int, 128, "most running requests of a decode rank"),
    "batch-tokens": (int, 8192, "most prompt tokens of a prefill step"),
    "concurrency": (int, 0, "requests in flight (default: 1.25 times what decode can run)"),
    "rate": (float, 0.0, "requests per second at random moments, instead of --concurrency"),
    "seconds": (float, 10.0, "of each measured window"),
    "warm-up": (float, 3.0, "seconds of load before a window, at least"),
    "layers-per-group": (int, 0, "layers whose KV is sent together (default: all)"),
    "http-processes": (int, 1, "of the router"),
    "start-timeout": (float, 300.0, "seconds for all processes to be ready"),
    "seed": (int, 0, "of prompts and moments"),
}
_FIELDS = {"model_shape": "shape", "warm_up": "warm_up_s", "start_timeout": "start_timeout_s"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench pair``."""
    parser.add_argument(
        "--model-shape",
        default="deepseek-v3",
        help="deepseek-v3, tiny, or a checkpoint folder, whose weights are not read",
    )
    for name, (kind, default, text) in _HELP.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="on which the workers run"
    )
    transports = ("auto", "loopback", "nixl", "mooncake")
    parser.add_argument("--transport", choices=transports, default="auto", help="that moves KV")
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "bfloat16", "fp8"),
        default="auto",
        help="in which KV is stored (auto: that of the model)",
    )
    parser.add_argument(
        "--cuda-graphs",
        choices=("auto", "on", "off"),
        default="auto",
        help="whether decode captures its steps",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="any other field of the configuration, as prefill.scatter_tokens=off",
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="where the report goes (default: stdout)"
    )
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the processes' logs")


def run(arguments: argparse.Namespace) -> int:
    """Measure, write the report, show a summary on stderr; 1 if a request failed."""
    # Imported late: every `tandem` command reads this file, few need torch.
    from bench.engine.report import say, write_report
    from bench.pair.options import PairOptions
    from bench.pair.run import run_pair

    names = {field.name for field in dataclasses.fields(PairOptions)}
    values: dict[str, Any] = {
        _FIELDS.get(name, name): value for name, value in vars(arguments).items()
    }
    values["settings"] = tuple(arguments.settings)
    options = PairOptions(**{name: value for name, value in values.items() if name in names})
    logs = arguments.logs
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    report = run_pair(options, logs)
    for line in summarise(report):
        say(line)
    write_report(report, arguments.json)
    return 1 if report["num_failed"] else 0


def _tell_workers(pair: Any, alone: Any) -> Iterator[str]:
    """What the two roles did in the pair; nothing where nobody looked often enough."""
    if not pair or not alone:
        return
    names = ("running", "waiting", "receiving", "queued")
    decode, prefill = pair["decode"], pair["prefill"]
    shown = ", ".join(f"{decode[name]:.1f} {name}" for name in names)
    yield (
        f"decode         {shown}; step {_ms(decode['step_ms'])}"
        f" (alone {_ms(alone['decode']['step_ms'])}), gap {_ms(decode['gap_ms'])}"
    )
    shown = ", ".join(f"{prefill[name]:.1f} {name}" for name in ("waiting", "running", "sending"))
    yield (
        f"prefill        {shown}; {prefill['steps_per_s']:.1f} steps/s of"
        f" {prefill['tokens_per_step'] or 0:.0f} tokens, {_ms(prefill['step_ms'])} each,"
        f" {prefill['busy']:.0%} of the time;"
        f" at least {prefill['least_free_blocks']:.0f} blocks free"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def summarise(report: Report) -> list[str]:
    """A few lines for a person."""
    lines = [str(report["label"])]
    found: Any = report
    for name in ("prefill_alone", "decode_alone", "pair"):
        phase = found[name]
        rates = {
            what: phase[key]
            for what, key in (
                ("requests/s", "requests_per_s"),
                ("tok/s in", "input_tokens_per_s"),
                ("tok/s out", "output_tokens_per_s"),
            )
            if key in phase
        }
        shown = ", ".join(f"{value:.1f} {what}" for what, value in rates.items())
        context = phase.get("mean_context")
        told = "" if context is None else f", contexts of {context:.0f}"
        failed = f"{phase['window_s']:.1f} s, {phase['num_failed']} failed"
        lines.append(f"{name:14} {shown}; {failed}{told}")
    lines += [*_tell_workers(found["pair"]["workers"], found["decode_alone"]["workers"])]
    for name in ("ttft_ms", "tpot_ms"):
        times = found["pair"][name]
        shown = ", ".join(f"{q} {times[q]:.2f}" for q in ("p50", "p90", "p99", "max"))
        lines.append(f"{name:14} {shown} of {times['count']}")
    stages = found["pair"]["stages_ms"]
    for name in ("prefill_queue", "prefill_compute", "decode_admission", "kv_exposed"):
        if name in stages:
            shown = ", ".join(f"{q} {stages[name][q]:.2f}" for q in ("p50", "p99", "max"))
            lines.append(f"{name:16} {shown} ms")
    ratio, slower = found["ratio"], found["slower_side"]
    lines.append(
        "ratio          none" if ratio is None else f"ratio          {ratio:.3f} of {slower} alone"
    )
    return lines + [f"note: {note}" for note in found["notes"]]
