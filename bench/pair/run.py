"""The phases of a measurement on one cluster: prefill alone, decode alone, both. And its report."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from bench.engine.machine import describe_command, describe_machine
from bench.engine.report import Report, say
from bench.pair.client import Target
from bench.pair.cluster import PairCluster
from bench.pair.compiled import CompiledKernels
from bench.pair.figures import (
    Window,
    all_run_in,
    count_failed,
    describe_decode,
    describe_pair,
    describe_prefill,
)
from bench.pair.load import Load
from bench.pair.model_folder import write_model_folder
from bench.pair.options import MODEL_NAME, PairOptions
from bench.pair.watch import Watch, describe_workers
from deploy.plan import Role
from engine.boot.jit_cache import use_jit_cache
from engine.boot.warm_up import ROWS_VARIABLE
from engine.config import DeepseekV3Config

NOTES = (
    "weights are invented; experts are chosen by the invented router, so they are not balanced",
    "the model is drawn at temperature 1: every request goes a way of its own",
    "requests/s of decode alone are its tokens/s over the tokens of an answer but the first; its"
    " prompts are shorter and its answers longer, so that contexts are as long in the mean",
    "the pair's load ran before anything was measured: each phase finds warm processes and GPUs",
    "requests/s of the pair are its output tokens/s over the tokens of an answer",
)
_Measured = tuple[Report, Window]
_NUM_FIRST = 4
_FIRST_TOKENS = 8


def run_pair(options: PairOptions, log_dir: Path | None = None) -> Report:
    """Measure.

    Args:
        options: what.
        log_dir: keeps the logs of the processes; None for a temporary folder.

    Raises:
        ConfigError: a value that cannot work here.
        ClusterError: a process ended, or blocks were not given back.
    """
    config = options.model()
    kernels = CompiledKernels(use_jit_cache() if options.device == "cuda" else None)
    with tempfile.TemporaryDirectory(prefix="tandem-pair-") as temporary:
        folder = Path(temporary) if log_dir is None else log_dir
        model = folder / "model"
        write_model_folder(model, config)
        began = time.perf_counter()
        rows = {ROWS_VARIABLE: ",".join(map(str, options.prefill_rows))}
        cluster = PairCluster(
            options.cluster(model),
            folder,
            start_timeout_s=options.start_timeout_s,
            environments={Role.PREFILL: rows},
        )
        with cluster:
            start_s = time.perf_counter() - began
            say(f"ready after {start_s:.1f} s")
            phases = _Phases(options, config, cluster, kernels)
            phases.run()
    return {
        "benchmark": "pair",
        "label": options.label,
        "notes": [*NOTES, *phases.notes],
        "options": dataclasses.asdict(options),
        "start_s": start_s,
        **compare(phases.reports, num_running=options.num_running),
        **phases.reports,
        "num_failed": phases.num_failed,
        "pools_empty": True,  # else the phase would have failed
        "machine": describe_machine(options.device, options.prefill_tp + options.decode_dp),
        **describe_command(),
    }


def compare(reports: dict[str, Report], *, num_running: int) -> Report:
    """The pair's rate over that of the slower side alone.

    Decode alone can do at least what it did with fewer than ``num_running`` requests. Where that
    is less than prefill's rate, nobody knows which side is the slower one.
    """
    rates = {side: _rate(reports[f"{side}_alone"]) for side in ("prefill", "decode")}
    slower = min(rates, key=rates.__getitem__)
    if slower == "decode" and reports["decode_alone"]["num_running"] != num_running:
        return {"slower_side": "unknown", "ratio": None}
    return {
        "slower_side": slower,
        "ratio": _rate(reports["pair"]) / rates[slower] if rates[slower] else None,
    }


def _rate(report: Report) -> float:
    rate = report["requests_per_s"]
    assert isinstance(rate, float)
    return rate


class _Phases:
    """Each phase begins and ends with empty pools."""

    def __init__(
        self,
        options: PairOptions,
        config: DeepseekV3Config,
        cluster: PairCluster,
        kernels: CompiledKernels,
    ) -> None:
        kernels.take()  # those of the start
        self._kernels = kernels
        self.reports: dict[str, Report] = {}
        self.notes: list[str] = []
        self.num_failed = 0
        self._options = options
        self._config = config
        self._cluster = cluster
        host, port = cluster.config.cluster.host, cluster.config.router.port
        self._target = Target(host=host, port=port, model=MODEL_NAME)
        self._num_loads = 0

    def run(self) -> None:
        """All of them, behind a while of the pair's own load: nothing is new or cold for any."""
        options = self._options
        self._phase("first", self._first)
        self._phase("warm", self._warm)
        self._phase("prefill_alone", self._prefill)
        self._phase("decode_alone", self._decode)
        self._phase("pair", self._pair)
        decode = self.reports["decode_alone"]
        if decode["num_running"] != options.num_running:
            self.notes.append(
                f"decode alone ran {decode['num_running']} of {options.num_running} requests at"
                " once: answers were over before all had begun; raise --decode-len"
            )
        if options.rate:
            self.notes.append(
                f"the pair was given {options.rate:g} requests/s: its ratio is no limit"
            )

    def _phase(self, name: str, measure: Callable[[], Awaitable[_Measured]]) -> None:
        began, cpu_s = time.perf_counter(), time.process_time()
        router_s = self._cluster.router_cpu_s()
        watch = Watch(self._cluster.metrics_addresses())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report, window = runner.run(self._watched(measure, watch))
        seconds = time.perf_counter() - began
        compiled = self._kernels.take()
        self.reports[name] = {
            **report,
            "workers": describe_workers(
                watch.snapshots, window, num_decode_ranks=self._options.decode_dp
            ),
            "compiled": compiled,
            "client_cpu_share": (time.process_time() - cpu_s) / seconds,
            "router_cpu_share": (self._cluster.router_cpu_s() - router_s) / seconds,
        }
        if compiled and name not in ("first", "warm"):
            self.notes.append(f"{name} compiled {len(compiled)} kernels, so steps waited for it")
        self._cluster.wait_idle()
        say(f"{name}: {seconds:.1f} s, {report.get('requests_per_s', 0.0):.2f} requests/s")

    async def _watched(
        self, measure: Callable[[], Awaitable[_Measured]], watch: Watch
    ) -> _Measured:
        """Give up when a process ends, instead of waiting for its answers."""
        work, watching = asyncio.ensure_future(measure()), asyncio.ensure_future(watch.run())
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=0.5)
                self._cluster.check()
            return work.result()
        finally:
            work.cancel()
            watching.cancel()
            await asyncio.gather(work, watching, return_exceptions=True)

    async def _first(self) -> _Measured:
        """What is done once: connections, handshakes, buffers, steps of so many prompts."""
        load = self._load(min(_FIRST_TOKENS, self._options.output_len))
        for count in range(1, self._options.num_prompts_ahead + 1):
            await load.burst(count)
        await load.burst(_NUM_FIRST * self._options.decode_dp)
        self._count_failed(load)
        return {}, (0.0, 0.0)

    async def _warm(self) -> _Measured:
        load = self._load(self._options.output_len)
        window = await load.window(
            in_flight=self._options.num_in_flight,
            rate=0.0,
            warm_up_s=self._options.warm_up_s,
            seconds=self._options.warm_up_s,
        )
        self._count_failed(load)
        return {}, window

    async def _prefill(self) -> _Measured:
        load = self._load(1)
        window = await self._window(load, rate=0.0)
        return describe_prefill(load.logs, window), window

    async def _decode(self) -> _Measured:
        options = self._options
        load = self._load(options.decode_alone_len, prompt_len=options.decode_prompt_len)
        await load.burst(self._options.num_running)
        self._count_failed(load)
        return describe_decode(load.logs, self._options.output_len), all_run_in(load.logs)[1]

    async def _pair(self) -> _Measured:
        load = self._load(self._options.output_len)
        window = await self._window(load, rate=self._options.rate)
        return describe_pair(load.logs, window), window

    async def _window(self, load: Load, *, rate: float) -> Window:
        options = self._options
        window = await load.window(
            in_flight=options.num_in_flight,
            rate=rate,
            warm_up_s=options.warm_up_s,
            seconds=options.seconds,
        )
        self._count_failed(load)
        return window

    def _load(self, max_tokens: int, prompt_len: int | None = None) -> Load:
        self._num_loads += 1
        return Load(
            target=self._target,
            vocab_size=self._config.vocab_size,
            prompt_len=prompt_len or self._options.prompt_len,
            max_tokens=max_tokens,
            seed=1000 * self._options.seed + self._num_loads,
        )

    def _count_failed(self, load: Load) -> None:
        self.num_failed += count_failed(load.logs)
        for error in sorted({log.error for log in load.logs if log.error})[:3]:
            say(f"a request failed: {error}")
            self.notes.append(f"a request failed: {error}")
