"""What a decode step costs the host, per number of requests: all but the device's own work.

Run ``python -m bench.engine.decode_host``; prints one JSON object with milliseconds per step,
medians. A real rank, scheduler and block pool run requests of ``--context`` tokens whose next
tokens are made up; the model is left out. The parts, in the order of an overlapped turn:

- plan: expire, admit, choose the step.
- inputs: its arrays by the graphs' slots, padded and packed for the one copy to the device.
- complete: results, tokens booked, stops checked, news written.
- tell: news taken and the load report made.
- frames: the news as the bytes of a stream, which another thread of the process does.

A GPU waits for nothing of this while a step is longer than the sum. Where steps are not overlapped
it waits for all but the frames.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from decode.offload import HostBlockStore
from decode.rank import DecodeRank
from decode.requests import DecodeRequest, Writer
from decode.reservations import RankLimits
from decode.scheduler import DecodeScheduler, StepPlan
from decode.tickets import TicketDesk
from engine.batch import UnreadTokens
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.inputs import StaticInputs
from engine.graphs.slots import Slots
from engine.memory.block_pool import BlockPool
from engine.request import Request, num_blocks_for
from engine.sampling.graph_sampler import GraphSampler
from engine.sampling.inputs import SampledToken
from kv_transfer.metadata import SlotArray, SlotLayout
from kv_transfer.ownership import Quarantine
from runtime.budget import Budget, BudgetKind
from runtime.pb import decode_pb2
from runtime.sampling import SamplingParams
from worker.lifecycle import DecodeStatus

BLOCK_SIZE = 64
VOCAB_SIZE = 1024
MAX_OUTPUT = 4096
PARTS = ("plan", "inputs", "complete", "tell", "frames")


class _NoReceiver:
    """Nothing arrives: requests begin with their KV here."""

    def expect(self, request_id: str, nonce: int, num_parts: int) -> int:
        raise NotImplementedError

    def forget(self, request_id: str) -> bool:
        raise NotImplementedError


class _NoCopies:
    """Nothing is preempted: the pool holds everything."""

    def copy_out(self, block_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def is_done(self, blocks: None) -> bool:
        raise NotImplementedError

    def copy_in(self, block_ids: Sequence[int], blocks: None) -> None:
        raise NotImplementedError

    def discard(self, blocks: None) -> None:
        raise NotImplementedError


@dataclass
class HostSteps:
    """A rank in mid-flight, and the seconds that each part of its steps took."""

    num_requests: int
    context: int
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        max_model_len = self.context + MAX_OUTPUT
        max_num_blocks = num_blocks_for(max_model_len, BLOCK_SIZE)
        self.pool = BlockPool(self.num_requests * max_num_blocks + 1, BLOCK_SIZE)
        self.scheduler = DecodeScheduler(
            self.pool,
            HostBlockStore(_NoCopies(), 0),
            max_num_seqs=self.num_requests,
            max_model_len=max_model_len,
        )
        self.rank = self._make_rank(max_model_len)
        self.slots = Slots(GraphSampler(VOCAB_SIZE, self.num_requests, "cpu"), max_num_blocks)
        self.buckets = batch_buckets(self.num_requests)
        self.static = StaticInputs(
            self.num_requests,
            max_num_blocks,
            block_size=BLOCK_SIZE,
            vocab_size=VOCAB_SIZE,
            device="cpu",
        )
        for serial in range(self.num_requests):
            self._add(serial)

    def _make_rank(self, max_model_len: int) -> DecodeRank:
        desk = TicketDesk(
            self.pool,
            SlotArray(1, SlotLayout()),
            _NoReceiver(),
            Quarantine(time.monotonic, timeout_s=30.0, max_blocks=1),
            fence_generation=lambda writer: 0,
        )
        return DecodeRank(
            self.pool,
            desk,
            self.scheduler,
            limits=RankLimits(
                max_model_len=max_model_len, transfer_timeout_s=60.0, vocab_size=VOCAB_SIZE
            ),
            metrics=DecodeMetrics(CollectorRegistry()),
            clock=time.monotonic,
            order=lambda order: None,
        )

    def _add(self, serial: int) -> None:
        """A request whose KV is here; every other one samples, every eighth with penalties."""
        prompt = [(serial * 7919 + index * 31) % VOCAB_SIZE for index in range(self.context)]
        params = SamplingParams(
            temperature=float(serial % 2),
            repetition_penalty=1.1 if serial % 8 == 0 else 1.0,
            stop_token_ids=(VOCAB_SIZE,),
            max_tokens=MAX_OUTPUT,
        )
        inner = Request(request_id=f"r{serial}", prompt_token_ids=prompt, sampling=params)
        inner.block_table = self.pool.allocate(num_blocks_for(self.context + 1, BLOCK_SIZE))
        inner.num_computed_tokens = self.context
        inner.output_token_ids.append(1)
        inner.update_block_hashes(BLOCK_SIZE)
        request = DecodeRequest(
            request=inner,
            serial=serial,
            router_id=f"router-{serial % 2}",
            writer=Writer(instance="prefill-0", epoch=1, num_ranks=1, address="127.0.0.1:1"),
            nonce=serial + 1,
            budget=Budget.start(BudgetKind.REQUEST, float("inf"), 0.0),
        )
        self.rank.live.add(request)
        for status in (DecodeStatus.CLAIMED, DecodeStatus.WAITING_FOR_KV, DecodeStatus.WAITING):
            request.move_to(status)
        self.scheduler.add(request)

    def run(self, num_steps: int) -> None:
        """Run overlapped turns: step n + 1 is planned and loaded before step n is completed."""
        before: StepPlan | None = None
        for number in range(num_steps + 1):
            with self._timed("plan"):
                plan = self.rank.plan_step()
            with self._timed("inputs"):
                self._load(plan, before)
            if before is not None:
                self._finish(before, number % VOCAB_SIZE)
            before = plan

    def _finish(self, plan: StepPlan, token_id: int) -> None:
        with self._timed("complete"):
            token_ids = torch.full((len(plan.requests),), token_id).tolist()
            self.rank.complete_step(plan, [(SampledToken(token_id),) for token_id in token_ids])
        with self._timed("tell"):
            news = self.rank.news.take()
            self.rank.load()
        with self._timed("frames"):
            for deltas in news.values():
                frame = decode_pb2.Frame(deltas=[delta.to_proto() for delta in deltas])
                frame.SerializeToString()

    def _load(self, plan: StepPlan, before: StepPlan | None) -> None:
        unread = None
        if before is not None:
            places = {id(item.request): row for row, item in enumerate(before.requests)}
            token_ids = torch.zeros(len(before.requests), dtype=torch.int64)
            unread = UnreadTokens(token_ids=token_ids, places=places)
        inputs = self.slots.inputs(plan.scheduled, unread)
        self.static.load(inputs, bucket_for(inputs.num_seqs, self.buckets))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part].append(time.perf_counter() - start)


def measure(num_requests: int, context: int, num_steps: int) -> dict[str, float]:
    """Milliseconds per step by part, and what a step costs the loop's thread in all."""
    steps = HostSteps(num_requests, context)
    steps.run(num_steps)
    medians = {part: statistics.median(steps.seconds[part][1:]) * 1e3 for part in PARTS}
    launch = medians["plan"] + medians["inputs"]
    totals = {"launch": launch, "loop": launch + medians["complete"] + medians["tell"]}
    worst = float(np.quantile(np.array(steps.seconds["plan"][1:]), 0.99)) * 1e3
    return {key: round(value, 4) for key, value in {**medians, **totals, "plan_p99": worst}.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=int, default=4096, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        str(count): measure(count, arguments.context, arguments.steps)
        for count in arguments.requests
    }
    machine = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
    }
    result = {"machine": machine, "context": arguments.context, "steps": arguments.steps}
    print(json.dumps({**result, "ms_per_step": results}, indent=1))


if __name__ == "__main__":
    main()
