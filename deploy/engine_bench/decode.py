"""Decode steps of a full batch: one after another, each rank with its own requests.

Steps run as in a decode worker: the next one is launched before the tokens of the one before are
read, by graphs or one kernel at a time. A step's time is the distance between two moments at which
tokens are there. Contexts are invented latents; requests neither end nor come. What a worker does
besides is left out: the meeting of the ranks before a step, admission, streams to routers.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch

from deploy.engine_bench.execution import decode_execution
from deploy.engine_bench.launcher import RankPlace
from deploy.engine_bench.machine import describe_command, describe_machine, read_clocks
from deploy.engine_bench.options import DecodeOptions, KVDtype
from deploy.engine_bench.profiling import profile_batch
from deploy.engine_bench.rates import HARDWARE, Bounds, RateBound, describe_rates
from deploy.engine_bench.report import Quantiles, Report, say
from deploy.engine_bench.session import BLOCK_SIZE, Session, open_session
from deploy.engine_bench.shapes import MeasuredModel
from deploy.engine_bench.timing import distances, idle_between
from engine.batch import build_forward_batch
from engine.bounds import DecodeBound, decode_bound
from engine.config import ModelConfig
from engine.graphs.capture import Capture
from engine.graphs.step_graphs import StepGraphs
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import PendingStep
from engine.warm_up import products
from runtime.sampling import SamplingParams

_NUM_EXTRA = 24
"""Steps besides the measured ones: for the clocks, the profile and the model alone."""
_KV_DTYPES = {KVDtype.BF16: None, KVDtype.FP8: torch.float8_e4m3fn}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 30)

Launch = Callable[[Sequence[ScheduledRequest], PendingStep | None], PendingStep]


def run_decode(options: DecodeOptions, place: RankPlace) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    setup = options.setup
    session = open_session(
        setup,
        place,
        partial(decode_execution, options),
        max_tokens=options.batch,
        list_products=lambda model: products(
            model, model.kernels, options.batch, rows=[options.batch]
        ),
        kv_tokens=options.batch * _blocks(options) * BLOCK_SIZE,
        kv_dtype=_KV_DTYPES[options.kv_dtype],
    )
    session.model.prepare_absorption()
    bench = _DecodeBench(session, options)
    bench.run_steps(setup.warm_ups)
    say("warmed up", rank=place.rank)
    times, idle = bench.run_steps(setup.repeats + 1)
    model_s = bench.time_model()
    clocks = bench.read_clocks()
    profile = None
    if setup.profile:
        named = bench.run_eagerly if options.graphs else None
        profile = profile_batch(session, bench.run_one, named=named)
    memory = session.memory_gb()
    bench.close()
    session.close()
    if place.rank:
        return None
    step_ms = Quantiles.of(times)
    return {
        "benchmark": "decode",
        "label": session.measured.label,
        "notes": session.measured.notes,
        "options": dataclasses.asdict(options),
        "mean_context": options.mean_context,
        "step_ms": dataclasses.asdict(step_ms),
        "rates": decode_rates(session.measured, options, step_ms.median / 1e3),
        "layers_us": describe_layers(session.measured, options, model_s),
        "idle_between_steps_ms": dataclasses.asdict(Quantiles.of(idle)) if idle else None,
        "profile": dataclasses.asdict(profile) if profile is not None else None,
        "bubbles_ms": None if profile is None else profile.bubbles_ms(step_ms.median),
        "memory_gb": memory,
        "machine": describe_machine(setup.device, place.world_size),
        "clocks": clocks,
        **describe_command(),
    }


def decode_rates(measured: MeasuredModel, options: DecodeOptions, step_s: float) -> Report:
    """The rates of steps that take so long; see `rates`."""
    return describe_rates(
        measured,
        tokens=options.batch * measured.num_gpus,
        seconds=step_s,
        ranks_factor=measured.virtual_gpus / measured.num_gpus,
        bounds=(
            _rate_bounds(measured.config, options, measured.num_gpus),
            _rate_bounds(measured.whole, options, measured.virtual_gpus),
        ),
        is_gpu=options.setup.device == "cuda",
    )


def describe_layers(
    measured: MeasuredModel, options: DecodeOptions, model_s: float | None
) -> Report | None:
    """Microseconds of a layer: embedding to last norm over the layers; None if not captured.

    The bounds are those of what ran here, without head and sampling.
    """
    if model_s is None:
        return None
    config = measured.config
    bounds = {
        name: bound.layers_s / config.num_hidden_layers * 1e6
        for name, bound in _bounds(config, options, measured.num_gpus).items()
    }
    layer = model_s / config.num_hidden_layers * 1e6
    return {
        "us_per_layer": layer,
        "num_layers": config.num_hidden_layers,
        "num_dense_layers": config.first_k_dense_replace,
        "bound_us": bounds,
        "share_of_bound": {name: bound / layer for name, bound in bounds.items()},
    }


def _rate_bounds(config: ModelConfig, options: DecodeOptions, num_gpus: int) -> Bounds:
    return {
        name: RateBound(
            overlapped=bound.tokens_per_s(num_gpus),
            serial=bound.tokens_per_s(num_gpus, serial=True),
        )
        for name, bound in _bounds(config, options, num_gpus).items()
    }


def _bounds(config: ModelConfig, options: DecodeOptions, ep: int) -> dict[str, DecodeBound]:
    kv_bytes = config.latent_dim * (1 if options.kv_dtype is KVDtype.FP8 else 2)
    return {
        name: decode_bound(
            config,
            options.batch,
            options.mean_context,
            ep=ep,
            kv_bytes=kv_bytes,
            hardware=hardware,
        )
        for name, hardware in HARDWARE.items()
    }


def _blocks(options: DecodeOptions) -> int:
    """Blocks of the longest request at its last step."""
    steps = options.setup.warm_ups + options.setup.repeats + _NUM_EXTRA
    return num_blocks_for(options.context[1] + steps, BLOCK_SIZE)


class _DecodeBench:
    """The requests of one rank, which never end, and their steps."""

    def __init__(self, session: Session, options: DecodeOptions) -> None:
        self._session = session
        self._options = options
        self._requests = _invent_requests(session, options)
        self._graphs = self._capture() if options.graphs else None
        self._launch = self._choose_launch()

    def run_steps(self, count: int) -> tuple[list[float], list[float]]:
        """Run steps back to back.

        Returns:
            Seconds of each but the first, and seconds that the device idled before each of these
            (empty on a CPU).
        """
        steps: list[PendingStep] = []
        ends: list[float] = []
        self._session.meet()
        for _ in range(count):
            is_ahead = self._options.overlap and bool(steps)
            steps.append(self._start(steps[-1] if is_ahead else None))
            if len(steps) > 1 and self._options.overlap:
                ends.append(self._finish(steps[-2]))
            if not self._options.overlap:
                ends.append(self._finish(steps[-1]))
        if steps and self._options.overlap:
            ends.append(self._finish(steps[-1]))
        self._session.meet()
        return distances(ends), idle_between(steps)

    def read_clocks(self) -> dict[str, int] | None:
        """Clocks of the device while it runs a step, after some others."""
        self.run_steps(_NUM_EXTRA // 2)
        step = self._start(None)
        clocks = read_clocks() if self._session.device.type == "cuda" else None
        self._finish(step)
        return clocks

    def run_one(self) -> None:
        """Run a step and wait for it."""
        self._finish(self._start(None))

    def run_eagerly(self) -> None:
        """The same, one kernel at a time."""
        runner = self._session.runner
        self._finish(self._start(None, launch=lambda items, _: runner.launch(items)))

    @torch.inference_mode()
    def time_model(self) -> float | None:
        """Return the device seconds of all layers alone, captured; None on a CPU."""
        session = self._session
        if session.device.type != "cuda" or not self._options.graphs:
            return None
        scheduled = [ScheduledRequest(request, 1) for request in self._requests]
        batch = build_forward_batch(scheduled, BLOCK_SIZE, session.device)

        def run_model() -> None:
            session.model.forward(batch, session.runner.kv_pool)

        graph = Capture(session.device).graph(run_model)
        session.meet()
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(self._options.setup.repeats + 1)
        ]
        for event in events:
            event.record()
            graph.replay()
        session.meet()
        graph.reset()
        times = [float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events)]
        return statistics.median(times)

    def close(self) -> None:
        """Forget the graphs, before the groups end."""
        if self._graphs is not None:
            self._graphs.close()

    def _choose_launch(self) -> Launch:
        runner, graphs = self._session.runner, self._graphs
        if graphs is None:
            return lambda items, after: runner.launch(items, after=after)
        return lambda items, after: graphs.launch_step(items, after=after)

    def _capture(self) -> StepGraphs:
        session, options = self._session, self._options
        graphs = StepGraphs(
            session.model,
            session.runner.kv_pool,
            vocab_size=session.measured.config.vocab_size,
            max_num_seqs=options.batch,
            max_model_len=_blocks(options) * BLOCK_SIZE,
        )
        graphs.buckets = (options.batch,)  # the only size that comes
        graphs.capture()
        say("captured", rank=session.place.rank)
        return graphs

    def _start(self, after: PendingStep | None, launch: Launch | None = None) -> PendingStep:
        scheduled = [ScheduledRequest(request, 1) for request in self._requests]
        step = (launch or self._launch)(scheduled, after)
        for request in self._requests:
            request.num_launched_tokens += 1
        return step

    def _finish(self, step: PendingStep) -> float:
        """Take the tokens over; when they were there."""
        results = step.collect()
        end = time.perf_counter()
        for result in results:
            request = result.request
            request.num_launched_tokens -= 1
            request.num_computed_tokens += 1
            # Invented weights may give no usable logits; the step was the same work.
            token = 0 if result.sampled is None else result.sampled.token_id
            request.output_token_ids.append(token)
        return end


def _invent_requests(session: Session, options: DecodeOptions) -> list[Request]:
    """Requests in the middle of their output, contexts spread evenly, blocks all over the pool."""
    generator = random.Random(session.place.rank)
    least, most = options.context
    num_blocks = _blocks(options)
    blocks = list(range(1, session.runner.kv_pool.num_blocks))
    generator.shuffle(blocks)
    requests = []
    for index in range(options.batch):
        context = least + (most - least) * index // max(options.batch - 1, 1)
        known = max(context - options.setup.warm_ups - 1, 1)
        requests.append(
            Request(
                request_id=f"request-{index}",
                prompt_token_ids=[0] * known,
                sampling=_GREEDY,
                block_table=blocks[index * num_blocks : (index + 1) * num_blocks],
                num_computed_tokens=known,
                output_token_ids=[generator.randrange(session.measured.config.vocab_size)],
            )
        )
    generator.shuffle(requests)
    return requests
