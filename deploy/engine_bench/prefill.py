"""The prefill of whole prompts: batches one after another, and one prompt alone.

Batches run as in a prefill worker: one is launched while the one before still runs, and its tokens
are read when they are there. A batch's time is the distance between two such moments. Ranks that
share heads run the same prompts, rank 0 samples; ranks with their own tokens run their own. What a
worker does besides is left out: queues, the plan that rank 0 sends to the others, KV transfer.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time

import torch

from deploy.engine_bench.launcher import RankPlace
from deploy.engine_bench.machine import describe_command, describe_machine, read_clocks
from deploy.engine_bench.options import PrefillOptions
from deploy.engine_bench.profiling import profile_batch
from deploy.engine_bench.report import Quantiles, Report, say
from deploy.engine_bench.session import BLOCK_SIZE, Session, open_session
from deploy.engine_bench.shapes import MeasuredModel
from engine.batch import build_forward_batch
from engine.bounds import H200, H200_REACHED, PrefillBound, PrefillTraffic, prefill_bound
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import PendingStep
from runtime.sampling import SamplingParams

_NUM_TTFT = 9
_GREEDY = SamplingParams(temperature=0.0)


def run_prefill(options: PrefillOptions, place: RankPlace) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    rows = {options.batch_tokens, options.prompt_len}
    if options.scatter:
        rows |= {-(-count // options.setup.tp) for count in rows}
    session = open_session(
        options.setup,
        place,
        rows=sorted(rows),
        kv_tokens=2 * options.num_prompts * _blocks(options) * BLOCK_SIZE,
    )
    bench = _PrefillBench(session, options)
    bench.run_batches(options.setup.warm_ups)
    say("warmed up", rank=place.rank)
    times, idle = bench.run_batches(options.setup.repeats + 1)
    ttft = bench.run_alone() if options.ttft else []
    bench.launch_some()
    clocks = read_clocks() if place.rank == 0 and session.device.type == "cuda" else []
    session.meet()
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
        "rates": describe_rates(session.measured, options, batch_ms.median / 1e3),
        "ttft_ms": dataclasses.asdict(Quantiles.of(ttft)) if ttft else None,
        "idle_between_batches_ms": dataclasses.asdict(Quantiles.of(idle)) if idle else None,
        "profile": dataclasses.asdict(profile) if profile is not None else None,
        "memory_gb": memory,
        "machine": describe_machine(options.setup.device, place.world_size),
        "clocks": clocks,
        **describe_command(),
    }


def describe_rates(measured: MeasuredModel, options: PrefillOptions, batch_s: float) -> Report:
    """Tokens per second as they were measured, what they stand for, and the bounds of both.

    ``as_run`` is what the ranks here did. ``node`` is the same for all layers and for all GPUs
    that the ranks stand for, under its label; where nothing was left out the two are equal.
    """
    own_tokens = options.setup.dp > 1
    tokens = options.batch_tokens * options.setup.dp
    as_run = tokens / batch_s
    gpus = measured.virtual_gpus
    # Ranks that share heads run the batch of the whole node; ranks with own tokens only theirs.
    node = as_run * (gpus / measured.num_gpus if own_tokens else 1) / measured.layer_scale
    here = _bound(measured, options, is_node=False)
    there = _bound(measured, options, is_node=True)
    scaled = f", times scaled by {measured.layer_scale:.3f}" if measured.layer_scale != 1 else ""
    return {
        "as_run": {
            "label": measured.label,
            "num_gpus": measured.num_gpus,
            "tokens_per_batch": tokens,
            "tokens_per_s": as_run,
            "tokens_per_s_per_gpu": as_run / measured.num_gpus,
            **_shares(here, as_run, options),
        },
        "node": {
            "label": f"{measured.label}{scaled}; stands for {gpus} GPUs and all layers"
            if not measured.is_whole
            else measured.label,
            "num_gpus": gpus,
            "tokens_per_s": node,
            "tokens_per_s_per_gpu": node / gpus,
            **_shares(there, node, options),
        },
    }


def _bound(
    measured: MeasuredModel, options: PrefillOptions, *, is_node: bool
) -> dict[str, PrefillBound]:
    traffic = PrefillTraffic.LATENTS_FP8 if options.scatter else PrefillTraffic.ALL_REDUCE
    if options.setup.dp > 1:
        traffic = PrefillTraffic.ALL_TO_ALL
    return {
        name: prefill_bound(
            measured.whole if is_node else measured.config,
            options.prompt_len,
            num_gpus=measured.virtual_gpus if is_node else measured.num_gpus,
            traffic=traffic,
            hardware=hardware,
        )
        for name, hardware in (("data_sheet", H200), ("reached", H200_REACHED))
    }


def _shares(
    bounds: dict[str, PrefillBound], tokens_per_s: float, options: PrefillOptions
) -> Report:
    """The bounds of GPUs, and on GPUs the shares of them."""
    is_gpu = options.setup.device == "cuda"
    shares = {name: tokens_per_s / bound.overlapped for name, bound in bounds.items()}
    return {
        "bound_tokens_per_s": {name: bound.overlapped for name, bound in bounds.items()},
        "serial_bound_tokens_per_s": {name: bound.serial for name, bound in bounds.items()},
        "share_of_bound": shares if is_gpu else None,
    }


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
        times = [after - before for before, after in itertools.pairwise(ends)]
        return times, _idle(steps)

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

    def launch_some(self) -> None:
        """Keep the device busy for a while without waiting for it."""
        for _ in range(3):
            self._launch(self._schedule(self._options.num_prompts))

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


def _idle(steps: list[PendingStep | None]) -> list[float]:
    """Of each step but the first, whose predecessor belongs to another measurement."""
    idle = [step.idle_s for step in steps[1:] if step is not None]
    return [seconds for seconds in idle if seconds is not None]
