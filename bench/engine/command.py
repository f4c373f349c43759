"""The arguments of ``tandem bench prefill``, ``tandem bench decode`` and ``tandem bench rows``."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from bench.engine.options import DecodeOptions, PrefillOptions, Setup

_FIELDS = {"warm_up": "warm_up_s"}


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench prefill``."""
    _add_prefill(parser)
    _add_output(parser)


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench decode``."""
    _add_decode(parser)
    _add_output(parser)


def add_rows_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench rows``."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="one row a line: prefill ... or decode ..."
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="where the lines are added (default: stdout)"
    )
    parser.add_argument(
        "--add",
        default="",
        metavar="ARGUMENTS",
        help='to every row, over what it says, as "--seconds 10 --profile off"',
    )


def run_prefill_command(arguments: argparse.Namespace) -> int:
    """Measure, write the report, show a summary on stderr."""
    return _measure(_prefill_options(arguments), arguments)


def run_decode_command(arguments: argparse.Namespace) -> int:
    """The same for decode steps."""
    return _measure(_decode_options(arguments), arguments)


def run_rows_command(arguments: argparse.Namespace) -> int:
    """Measure row after row, and write each report as a line of JSON."""
    from bench.engine.report import say
    from bench.engine.rows import launch_rows, read_rows

    rows = read_rows(arguments.file, shlex.split(arguments.add), parse_row)
    say(f"{launch_rows(rows, arguments.json)} rows")
    return 0


def parse_range(text: str, name: str) -> tuple[int, int]:
    """Read ``1500-1660`` or a single number.

    Raises:
        ConfigError: it is neither.
    """
    least, _, most = text.partition("-")
    try:
        return int(least), int(most or least)
    except ValueError as error:
        raise ConfigError(name, text, "is no range", "for example 1500-1660") from error


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    """Read ``128,0,0,0``.

    Raises:
        ConfigError: it is no list of numbers.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(name, text, "is no list of numbers", "for example 128,0,0,0") from error


def parse_row(name: str, words: Sequence[str]) -> PrefillOptions | DecodeOptions:
    """Make options of a row of a file.

    Args:
        name: of the row, for what argparse says of it.
        words: ``prefill`` or ``decode``, and its arguments.

    Raises:
        ConfigError: what cannot be measured.
        SystemExit: words that are no arguments, after argparse has said so.
    """
    parser = argparse.ArgumentParser(prog=name, add_help=False)
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="prefill|decode")
    _add_prefill(subjects.add_parser("prefill", add_help=False))
    _add_decode(subjects.add_parser("decode", add_help=False))
    arguments = parser.parse_args(words)
    if arguments.subject == "prefill":
        return _prefill_options(arguments)
    return _decode_options(arguments)


def _measure(options: PrefillOptions | DecodeOptions, arguments: argparse.Namespace) -> int:
    # Imported late: every `tandem` command reads this file, few need torch.
    from bench.engine.report import write_report
    from bench.engine.rows import Row, check, launch_one
    from bench.engine.summary import show

    row = Row(options=options)
    check(row)
    report = launch_one(row)
    if report is not None:
        show(report, trace=arguments.trace)
        write_report(report, arguments.json)
    return 0


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    _add_setup(parser)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads")
    parser.add_argument(
        "--prompt-len", type=int, default=4096, help="tokens of each prompt that run"
    )
    parser.add_argument(
        "--cached-len",
        type=int,
        default=0,
        help="tokens before them that a prefix cache holds: no bound then",
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=16384, help="of a batch; with --dp of each rank"
    )
    parser.add_argument(
        "--ttft", type=_switch, default=True, help="also time one prompt alone: on, off"
    )
    parser.add_argument(
        "--drafts",
        type=_switch,
        default=False,
        help="run the layer for drafts, as where decode has some: on, off",
    )


def _add_decode(parser: argparse.ArgumentParser) -> None:
    _add_setup(parser)
    requests = parser.add_mutually_exclusive_group()
    requests.add_argument("--batch", type=int, default=128, help="requests of each rank")
    requests.add_argument(
        "--requests-per-rank", metavar="N,N", help="unequal ranks, as 128,0,0,0; the first is timed"
    )
    parser.add_argument(
        "--context-lens",
        "--context",
        default="1500-1660",
        metavar="N-M",
        help="tokens of each request at its first step, drawn from there",
    )
    parser.add_argument(
        "--output-len",
        type=int,
        default=128,
        help="steps of a request; another one as long follows it",
    )
    parser.add_argument(
        "--drafts",
        type=_drafts,
        default=0,
        help='of each request and step, by the layer for it; "auto": as many as pay',
    )
    parser.add_argument(
        "--accept",
        type=_share,
        help='of drafts that come to their turn, a share; or "model": what the layer guesses',
    )
    parser.add_argument(
        "--drawn-inputs",
        action="store_true",
        help="requests go on with drawn tokens, whatever they said; needs decode.overlap_steps=off",
    )
    parser.add_argument(
        "--step-log", default="", metavar="OUT", help="write what every step said and took there"
    )
    parser.add_argument(
        "--same-text-as", default="", metavar="FILE", help="compare tokens with such a file"
    )
    parser.add_argument(
        "--grammar", action="store_true", help="bind every request by a JSON schema of its own"
    )


def _add_setup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-shape",
        dest="shape",
        default="deepseek-v3",
        help="deepseek-v3, tiny, or a checkpoint folder, whose weights are not read",
    )
    parser.add_argument("--dp", type=int, default=1, help="ranks with their own tokens")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all)")
    parser.add_argument(
        "--shard-of",
        type=int,
        default=0,
        metavar="N",
        help="each rank holds what one of N ranks holds: a proxy on fewer GPUs",
    )
    parser.add_argument(
        "--shard-axis", choices=("tp", "dp"), help="of those N ranks (default: the one in use)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="on which the ranks run"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=0, help="as model.max_model_len (default: the model's)"
    )
    _add_load(parser)
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="SECTION.FIELD=VALUE",
        help="a field of the worker's configuration, as decode.dispatcher=deep-ep",
    )
    parser.add_argument(
        "--profile", type=_switch, default=True, help="also time the stages of a step: on, off"
    )
    parser.add_argument(
        "--record-load",
        default="",
        metavar="OUT",
        help="write what experts got there, as tandem experts record does",
    )
    parser.add_argument(
        "--expert-load",
        type=_switch,
        default=True,
        help="count tokens by expert, as workers do; off: to see what it costs",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--routing",
        choices=("uniform", "even", "skewed", "model"),
        default="uniform",
        help="experts drawn by each token, alike or by a synthetic skew, even (a bound), or chosen"
        " by the invented router",
    )
    parser.add_argument(
        "--play-ranks",
        dest="plays",
        choices=("in-order", "recorded", "planned"),
        default="",
        help="with --routing skewed and --shard-of N: play the busiest of N ranks and others of"
        " them, experts in order, placed by a recording of the skew, or moved by a plan",
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of all requests; 0 is greedy"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="of all requests")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured, at least")
    parser.add_argument("--min-steps", type=int, default=0, help="measured, at least")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds before, at least")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="where the report goes (default: stdout)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="OUT", help="write the whole table of stages there"
    )


def _setup(arguments: argparse.Namespace, default_axis: str) -> Setup:
    from bench.engine.options import Axis, Routing, Setup
    from bench.engine.plays import Plays

    names = {field.name for field in dataclasses.fields(Setup)}
    given = {_FIELDS.get(name, name): value for name, value in vars(arguments).items()}
    values: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    tp = values.get("tp", 1)
    axis = "tp" if tp > 1 else "dp" if arguments.dp > 1 else default_axis
    return Setup(
        **{
            **values,
            "settings": tuple(arguments.settings),
            "routing": Routing(arguments.routing),
            "plays": Plays(arguments.plays),
            "shard_axis": Axis(arguments.shard_axis or axis),
        }
    )


def _prefill_options(arguments: argparse.Namespace) -> PrefillOptions:
    from bench.engine.options import PrefillOptions

    return PrefillOptions(
        setup=_setup(arguments, "tp"),
        prompt_len=arguments.prompt_len,
        cached_len=arguments.cached_len,
        batch_tokens=arguments.batch_tokens,
        ttft=arguments.ttft,
        drafts=arguments.drafts,
    )


def _decode_options(arguments: argparse.Namespace) -> DecodeOptions:
    from bench.engine.options import DecodeOptions

    requests = (arguments.batch,) * arguments.dp
    if arguments.requests_per_rank is not None:
        requests = parse_counts(arguments.requests_per_rank, "requests-per-rank")
    return DecodeOptions(
        setup=_setup(arguments, "dp"),
        requests=requests,
        context_lens=parse_range(arguments.context_lens, "context-lens"),
        output_len=arguments.output_len,
        grammar=arguments.grammar,
        drafts=arguments.drafts,
        accept=arguments.accept,
        drawn_inputs=arguments.drawn_inputs,
        step_log=arguments.step_log,
        same_text_as=arguments.same_text_as,
    )


def _share(text: str) -> float | None:
    return None if text == "model" else float(text)


def _drafts(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"
