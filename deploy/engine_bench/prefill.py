"""The prefill of whole prompts: batches one after another, and one prompt alone.

Batches run as in a prefill worker: one is launched while the one before still runs, and its tokens
are read when they are there. A batch's time is the distance between two such moments. Ranks that
share heads run the same prompts, rank 0 samples; ranks with their own tokens run their own. What a
worker does besides is left out: queues, the plan that rank 0 sends to the others, KV transfer.
"""

from __future__ import annotations

import dataclasses
import random
import time
from functools import partial

import torch

from deploy.engine_bench.execution import prefill_execution
from deploy.engine_bench.launcher import RankPlace
from deploy.engine_bench.machine import describe_command, describe_machine, read_clocks
from deploy.engine_bench.options import PrefillOptions
from deploy.engine_bench.profiling import profile_batch
from deploy.engine_bench.rates import HARDWARE, Bounds, RateBound, describe_rates
from deploy.engine_bench.report import Quantiles, Report, say
from deploy.engine_bench.session import BLOCK_SIZE, Session, open_session
from deploy.engine_bench.shapes import MeasuredModel
from deploy.engine_bench.timing import distances, idle_between
from engine.batch import build_forward_batch
from engine.bounds import PrefillTraffic, prefill_bound
from engine.config import ModelConfig
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import PendingStep
from engine.warm_up import Product, attention_products, products
from runtime.sampling import SamplingParams

_NUM_TTFT = 9
_GREEDY = SamplingParams(temperature=0.0)


def run_prefill(options: PrefillOptions, place: RankPlace) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    session = open_session(
        options.setup,
        place,
        partial(prefill_execution, options),
        max_tokens=options.batch_tokens,
        list_products=partial(_list_products, options),
        kv_tokens=2 * options.num_prompts * _blocks(options) * BLOCK_SIZE,
    )
    bench = _PrefillBench(session, options)
    bench.run_batches(options.setup.warm_ups)
    say("warmed up", rank=place.rank)
    times, idle = bench.run_batches(options.setup.repeats + 1)
    ttft = bench.run_alone() if options.ttft else []
    clocks = bench.read_clocks()
    profile = profile_batch(session, bench.run_one) if options.setup.profile else None
    memory = session.memory_gb()
    session.close()
    if place.rank:
        return None
    batch_ms = Quantiles.of(times)
    return {
        "benchmark": "prefill",
        "label": session.measured.label,
        "notes": session.measured.notes,
        "options": dataclasses.asdict(options),
        "batch_ms": dataclasses.asdict(batch_ms),
        "rates": prefill_rates(session.measured, options, batch_ms.median / 1e3),
        "ttft_ms": dataclasses.asdict(Quantiles.of(ttft)) if ttft else None,
        "idle_between_batches_ms": dataclasses.asdict(Quantiles.of(idle)) if idle else None,
        "profile": dataclasses.asdict(profile) if profile is not None else None,
        "bubbles_ms": None if profile is None else profile.bubbles_ms(batch_ms.median),
        "memory_gb": memory,
        "machine": describe_machine(options.setup.device, place.world_size),
        "clocks": clocks,
        **describe_command(),
    }


def prefill_rates(measured: MeasuredModel, options: PrefillOptions, batch_s: float) -> Report:
    """The rates of batches that take so long; see `rates`."""
    own_tokens = options.setup.dp > 1
    # Ranks that share heads run the batch of the whole node; ranks with own tokens only theirs.
    factor = measured.virtual_gpus / measured.num_gpus if own_tokens else 1.0
    return describe_rates(
        measured,
        tokens=options.batch_tokens * options.setup.dp,
        seconds=batch_s,
        ranks_factor=factor,
        bounds=(
            _bounds(measured.config, options, measured.num_gpus),
            _bounds(measured.whole, options, measured.virtual_gpus),
        ),
        is_gpu=options.setup.device == "cuda",
    )


def _bounds(config: ModelConfig, options: PrefillOptions, num_gpus: int) -> Bounds:
    traffic = PrefillTraffic.LATENTS_FP8 if options.is_scattered else PrefillTraffic.ALL_REDUCE
    if options.setup.dp > 1:
        traffic = PrefillTraffic.ALL_TO_ALL
    bounds = {
        name: prefill_bound(
            config, options.prompt_len, num_gpus=num_gpus, traffic=traffic, hardware=hardware
        )
        for name, hardware in HARDWARE.items()
    }
    return {
        name: RateBound(overlapped=bound.overlapped, serial=bound.serial)
        for name, bound in bounds.items()
    }


def _list_products(options: PrefillOptions, model: DeepseekV3ForCausalLM) -> list[Product]:
    found = products(model, model.kernels, options.batch_tokens, rows=_rows(options))
    return [*attention_products(model, model.kernels), *found]


def _rows(options: PrefillOptions) -> list[int]:
    """Tokens of the steps and micro-batches that come, and each rank's rows of them."""
    rows = {options.batch_tokens, *([options.prompt_len] if options.ttft else [])}
    if options.overlap:
        rows |= {count // 2 for count in rows if count > 1}
    if options.is_scattered:
        rows |= {-(-count // options.setup.tp) for count in rows}
    return sorted(rows)


def _blocks(options: PrefillOptions) -> int:
    return num_blocks_for(options.prompt_len, BLOCK_SIZE)


class _PrefillBench:
    """Batches of one rank. Two sets of blocks, used in turn by batches that follow each other."""

    def __init__(self, session: Session, options: PrefillOptions) -> None:
        self._session = session
        self._options = options
        own = session.place.rank if options.setup.dp > 1 else 0
        self._random = random.Random(own)
        self._next_set = 0

    def run_batches(self, count: int) -> tuple[list[float], list[float]]:
        """Run batches back to back.

        Returns:
            Seconds of each but the first, and seconds that the device idled before each of these
            (empty on a CPU and on ranks that do not sample).
        """
        session = self._session
        batches = [self._schedule(self._options.num_prompts) for _ in range(count)]
        steps: list[PendingStep | None] = []
        ends: list[float] = []
        previous: _Launched | None = None
        session.meet()
        for batch in batches:
            launched = self._launch(batch)
            steps.append(launched.step)
            if previous is not None:
                previous.wait()
                ends.append(time.perf_counter())
            previous = launched
        if previous is not None:
            previous.wait()
            ends.append(time.perf_counter())
        session.meet()
        return distances(ends), idle_between(steps)

    def run_alone(self) -> list[float]:
        """Run single prompts on an idle node: seconds from the tokens to the sampled token."""
        times = []
        for _ in range(_NUM_TTFT):
            batch = self._schedule(1)
            self._session.meet()
            began = time.perf_counter()
            self._launch(batch).wait()
            times.append(time.perf_counter() - began)
        return times[_NUM_TTFT // 3 :]  # the first ones warm this size up

    def read_clocks(self) -> dict[str, int] | None:
        """Clocks of the device while it runs a batch."""
        launched = self._launch(self._schedule(self._options.num_prompts))
        clocks = read_clocks() if self._session.device.type == "cuda" else None
        launched.wait()
        return clocks

    def run_one(self) -> None:
        """Run a batch and wait for it."""
        self._launch(self._schedule(self._options.num_prompts)).wait()

    def _schedule(self, num_prompts: int) -> list[ScheduledRequest]:
        length, blocks = self._options.prompt_len, _blocks(self._options)
        first = 1 + self._next_set * self._options.num_prompts * blocks
        self._next_set = 1 - self._next_set
        vocabulary = self._session.measured.config.vocab_size
        return [
            ScheduledRequest(
                Request(
                    request_id=f"prompt-{index}",
                    prompt_token_ids=self._random.choices(range(vocabulary), k=length),
                    sampling=_GREEDY,
                    block_table=list(range(first + index * blocks, first + (index + 1) * blocks)),
                ),
                length,
            )
            for index in range(num_prompts)
        ]

    def _launch(self, batch: list[ScheduledRequest]) -> _Launched:
        session = self._session
        if not session.is_follower:
            return _Launched(step=session.runner.launch(batch))
        with torch.inference_mode():
            forward = build_forward_batch(batch, BLOCK_SIZE, session.device)
        session.runner.forward_only(forward)
        if session.device.type != "cuda":
            return _Launched()
        end = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        end.record()
        return _Launched(end=end)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A batch on its way: with tokens to collect, or, on a follower, with an event at its end."""

    step: PendingStep | None = None
    end: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Return when it is over."""
        if self.step is not None:
            self.step.collect()
        if self.end is not None:
            self.end.synchronize()
