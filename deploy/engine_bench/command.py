"""The arguments of ``tandem bench prefill`` and ``tandem bench decode``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.engine_bench.launcher import RankPlace
    from deploy.engine_bench.options import DecodeOptions, PrefillOptions, Setup
    from deploy.engine_bench.report import Report

OptionsT = TypeVar("OptionsT")


def add_prefill_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench prefill``."""
    _add_setup(parser)
    parser.add_argument("--prompt-len", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument(
        "--batch-tokens", type=int, default=16384, help="of a batch; with --dp of each rank"
    )
    parser.add_argument(
        "--overlap", type=_switch, help="two-batch overlap: on, off (default: on for several ranks)"
    )
    parser.add_argument(
        "--lag", type=int, default=1, help="operations that the second micro-batch stays behind"
    )
    parser.add_argument(
        "--scatter", type=_switch, default=True, help="tp ranks keep their rows only: on, off"
    )
    parser.add_argument(
        "--collectives",
        choices=("nccl", "symmetric"),
        default="nccl",
        help="of tp ranks: NCCL, or copy engines over symmetric memory",
    )
    parser.add_argument(
        "--ttft", type=_switch, default=True, help="also time one prompt alone: on, off"
    )


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare those of ``bench decode``."""
    _add_setup(parser)
    parser.add_argument("--batch", type=int, default=128, help="requests of each rank")
    parser.add_argument(
        "--context", default="1500-1660", metavar="N-M", help="tokens at the first measured step"
    )
    parser.add_argument(
        "--kv-dtype", choices=("bf16", "fp8"), default="bf16", help="in which KV is stored"
    )
    parser.add_argument("--graphs", type=_switch, default=True, help="CUDA graphs: on, off")
    parser.add_argument(
        "--overlap", type=_switch, default=True, help="launch a step ahead: on, off"
    )
    parser.add_argument(
        "--dependent-launches",
        type=_switch,
        default=True,
        help="bring a kernel onto the GPU while the one before it runs: on, off",
    )
    parser.add_argument(
        "--side-stream",
        type=_switch,
        default=True,
        help="run the shared expert beside routing and travelling tokens: on, off",
    )
    parser.add_argument(
        "--two-batch-overlap",
        type=_switch,
        default=False,
        help="run a step as two micro-batches in turns: on, off",
    )


def run_prefill_command(arguments: argparse.Namespace) -> int:
    """Measure, write the report, show a summary on stderr."""
    # Imported late: every `tandem` command reads this file, few need torch.
    from deploy.engine_bench.prefill import run_prefill

    options = _prefill_options(arguments)
    return _measure(arguments, options.setup, run_prefill, options)


def run_decode_command(arguments: argparse.Namespace) -> int:
    """The same for decode steps."""
    from deploy.engine_bench.decode import run_decode

    options = _decode_options(arguments)
    return _measure(arguments, options.setup, run_decode, options)


def _measure(
    arguments: argparse.Namespace,
    setup: Setup,
    run: Callable[[OptionsT, RankPlace], Report | None],
    options: OptionsT,
) -> int:
    from deploy.engine_bench.launcher import Job, launch
    from deploy.engine_bench.report import write_report
    from deploy.engine_bench.shapes import choose_model
    from deploy.engine_bench.summary import show

    # Refuses what cannot be run before any process starts.
    setup.dims(0).check_model(choose_model(setup).config)
    report = launch(Job(run=run, options=options, world_size=setup.world_size, device=setup.device))
    if report is not None:
        show(report, trace=arguments.trace)
        write_report(report, arguments.json)
    return 0


def _add_setup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model-shape",
        dest="shape",
        default="deepseek-v3",
        help="deepseek-v3, tiny, or a checkpoint folder, whose weights are not read",
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share heads")
    parser.add_argument("--dp", type=int, default=1, help="ranks with their own tokens")
    parser.add_argument(
        "--ep", type=int, default=0, help="ranks that share experts: all or 1 (default: all)"
    )
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
        "--routing",
        choices=("even", "model"),
        default="even",
        help="experts chosen evenly, or by the router with its invented weights",
    )
    parser.add_argument(
        "--dispatcher",
        choices=("auto", "nvlink", "deep-ep", "gathered"),
        default="auto",
        help="how tokens travel with --dp: by stores over NVLink (decode), DeepEP, or collectives",
    )
    parser.add_argument("--repeats", type=int, default=10, help="measured runs of the same batch")
    parser.add_argument("--warm-ups", type=int, default=3, help="runs before, not measured")
    parser.add_argument(
        "--profile", type=_switch, default=True, help="also time the stages of a batch: on, off"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="where the report goes (default: stdout)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="OUT", help="write the whole table of stages there"
    )


def _setup(arguments: argparse.Namespace, default_axis: str) -> Setup:
    from deploy.engine_bench.options import Axis, Routing, Setup
    from engine.parallel.open_dispatcher import DispatcherKind

    names = {field.name for field in dataclasses.fields(Setup)}
    values: dict[str, Any] = {
        name: value for name, value in vars(arguments).items() if name in names
    }
    ranks = arguments.tp * arguments.dp
    axis = "tp" if arguments.tp > 1 else "dp" if arguments.dp > 1 else default_axis
    return Setup(
        **{
            **values,
            "ep": arguments.ep or max(ranks, 1),
            "routing": Routing(arguments.routing),
            "dispatcher": DispatcherKind(arguments.dispatcher),
            "shard_axis": Axis(arguments.shard_axis or axis),
        }
    )


def _prefill_options(arguments: argparse.Namespace) -> PrefillOptions:
    from deploy.engine_bench.options import Collectives, PrefillOptions

    setup = _setup(arguments, "tp")
    return PrefillOptions(
        setup=setup,
        prompt_len=arguments.prompt_len,
        batch_tokens=arguments.batch_tokens,
        overlap=setup.world_size > 1 if arguments.overlap is None else arguments.overlap,
        lag=arguments.lag,
        scatter=arguments.scatter,
        collectives=Collectives(arguments.collectives),
        ttft=arguments.ttft,
    )


def _decode_options(arguments: argparse.Namespace) -> DecodeOptions:
    from deploy.engine_bench.options import DecodeOptions, KVDtype

    return DecodeOptions(
        setup=_setup(arguments, "dp"),
        batch=arguments.batch,
        context=parse_range(arguments.context, "context"),
        kv_dtype=KVDtype(arguments.kv_dtype),
        graphs=arguments.graphs,
        overlap=arguments.overlap,
        dependent_launches=arguments.dependent_launches,
        side_stream=arguments.side_stream,
        two_batch_overlap=arguments.two_batch_overlap,
    )


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text == "on"


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
