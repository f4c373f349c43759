"""Between two chunks a GPU idles for less than a millisecond, if the loop launches ahead; and first
tokens leave as soon as they are sampled, however long the next step takes to launch.
"""

import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.operations import do_nothing
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import AddRequest, Event, FirstTokenSampled, RankClosed
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from tests.prefill.fakes import BLOCK_SIZE, FakeTicketSender, grant_all, make_item

pytestmark = pytest.mark.gpu

WIDTH = 4096
NUM_PRODUCTS = 100  # some 20 ms of a large GPU
CHUNK = 256
NUM_REQUESTS = 6
NUM_CHUNKS = 4
VOCAB_SIZE = 4096


class BusyModel:
    """Keeps the device busy with products, and the host for as long as their launches take."""

    def __init__(self) -> None:
        self.weight = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 64
        self.head = torch.randn(VOCAB_SIZE, 64, device="cuda")

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> torch.Tensor:
        hidden = self.weight
        for _ in range(NUM_PRODUCTS):
            hidden = hidden @ self.weight
        return hidden[: batch.num_tokens, :64].float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


class LongModel(BusyModel):
    """More launches than CUDA takes ahead, so that launching is held up by the step before it."""

    NUM_PRODUCTS = 4000
    WIDTH = 1536

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.weight[: self.WIDTH, : self.WIDTH].contiguous()
        self.sampled: list[torch.cuda.Event] = []

    def forward(
        self,
        batch: ForwardBatch,
        kv_pool: KVPool,
        *,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = do_nothing,
    ) -> torch.Tensor:
        hidden = self.weight
        for number in range(self.NUM_PRODUCTS):
            hidden = hidden @ self.weight
            if number % 10 == 9:  # as often as between two operations of a layer
                meanwhile()
        return hidden[: batch.num_tokens, :64].float()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        self.sampled.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self.sampled[-1].record()
        return logits


def run_prompts(
    model: BusyModel,
    max_ahead: int,
    num_chunks: int,
    take: Callable[[Event], None] = lambda event: None,
) -> list[float]:
    """Idle seconds between the steps of a queue of prompts."""
    events: list[Event] = []
    gaps: list[float] = []

    def emit(event: Event) -> None:
        take(event)
        events.append(event)

    num_blocks = NUM_REQUESTS * num_chunks * CHUNK // BLOCK_SIZE + 1
    scheduler = Scheduler(
        BlockPool(num_blocks, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=CHUNK
    )
    sender = FakeTicketSender(lambda closure: loop.submit(RankClosed(0, closure)))
    pool = KVPool(num_blocks, 1, BLOCK_SIZE, KVSpec.shared(8), device="cuda")
    loop = EngineLoop(
        scheduler,
        ModelRunner(model, pool, Sampler(VOCAB_SIZE)),
        SenderGroup(sender),
        grant_all(emit, lambda command: loop.submit(command)),
        LoopSettings(
            max_model_len=4096, push=PushSettings(num_layers=1), max_ahead=max_ahead, idle_s=0.01
        ),
        observe_gap=gaps.append,
    )
    for nonce in range(1, NUM_REQUESTS + 1):
        loop.submit(AddRequest(make_item(nonce, num_chunks * CHUNK)))
    loop.take_commands()
    while scheduler.num_requests:
        loop.step()
        sender.close_all()
        loop.take_commands()
    scheduler.check_integrity()
    assert sum(isinstance(event, FirstTokenSampled) for event in events) == NUM_REQUESTS
    assert len(gaps) == NUM_REQUESTS * num_chunks - 1
    return gaps


def measure_gaps(max_ahead: int) -> list[float]:
    """Idle seconds between the steps of a queue of prompts, of several chunks each."""
    return run_prompts(BusyModel(), max_ahead, NUM_CHUNKS)


def test_chunks_follow_each_other_without_a_gap(capsys: pytest.CaptureFixture[str]) -> None:
    measure_gaps(1)  # first calls wait for memory and kernels
    one_by_one, ahead = measure_gaps(0), measure_gaps(1)
    with capsys.disabled():
        for name, gaps in (("one by one", one_by_one), ("launched ahead", ahead)):
            typical, worst = statistics.median(gaps) * 1e3, max(gaps) * 1e3
            print(f"\n{name}: idle between steps {typical:.3f} ms, at most {worst:.3f} ms")
    assert max(ahead) < 0.001
    assert statistics.median(ahead) < statistics.median(one_by_one)


def test_a_first_token_leaves_while_the_next_step_is_launched_and_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the device's clock: an event behind the logits, and one on an idle stream as it leaves."""
    model, idle = LongModel(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    left: list[torch.cuda.Event] = []

    def take(event: Event) -> None:
        if isinstance(event, FirstTokenSampled):
            left.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            left[-1].record(idle)

    run_prompts(model, 1, 1)  # first calls wait for memory and kernels
    model.sampled.clear()
    run_prompts(model, 1, 1, take)
    torch.cuda.synchronize()
    assert len(left) == len(model.sampled) == NUM_REQUESTS
    delays = [after.elapsed_time(token) for after, token in zip(model.sampled, left, strict=True)]
    steps = [a.elapsed_time(b) for a, b in pairwise(model.sampled)]
    with capsys.disabled():
        print(f"\nsteps of {statistics.median(steps):.1f} ms: a first token leaves", end=" ")
        print(f"{statistics.median(delays):.2f} ms after its logits, at most {max(delays):.2f}")
    assert max(delays) < 3.0
    for token, next_end in zip(left, model.sampled[1:], strict=False):
        assert token.elapsed_time(next_end) > 0, "it leaves before the next step ends"
