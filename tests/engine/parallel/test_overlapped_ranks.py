"""Decode steps of a whole model over ranks, as two micro-batches: the same states, and no transfer
is started while another one is under way where the library forbids it. The ranks are threads.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.boot.build import build_kv_pool, build_model
from engine.config import ModelConfig
from engine.execution import Execution
from engine.kernels.portable import PortableKernels
from engine.micro_batches import OverlapRule
from engine.parallel.deep_ep_buffers import LowLatencyBuffer
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape
from engine.parallel.groups import ProcessGroups
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.token_dispatcher import TURNS_LAG
from runtime.errors import InternalError
from tests.engine.parallel.fake_deep_ep import FakeLibraryBuffer
from tests.engine.parallel.layouts import make_step
from tests.engine.parallel.thread_ranks import Meetings, run_ranks, thread_groups
from tests.engine.relative_error import relative_error
from tests.engine.test_fp8_path import CONFIG
from tests.engine.tiny import write_checkpoint

NUM_RANKS, ROOM = 4, 32
KERNELS = PortableKernels(has_fp8=True)
SHAPE = ModelConfig.from_hf(CONFIG)
NUM_SEQS = [1, 2, 5, 8]
"""Of each rank in a step."""

Make = Callable[[ProcessGroups, Meetings], Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fp8"), CONFIG, fp8=True)


def make_low_latency(groups: ProcessGroups, meetings: Meetings) -> DeepEPLowLatencyDispatcher:
    shape = LowLatencyShape(
        num_ranks=groups.ep_group.size,
        num_experts=SHAPE.n_routed_experts,
        max_tokens_per_rank=ROOM,
        hidden_size=SHAPE.hidden_size,
    )
    library = FakeLibraryBuffer(groups.rank, meetings, shape)
    return DeepEPLowLatencyDispatcher(LowLatencyBuffer(library, shape))


def make_gathered(groups: ProcessGroups, meetings: Meetings) -> MaskedGatheredDispatcher:
    share = SHAPE.n_routed_experts // groups.ep_group.size
    return MaskedGatheredDispatcher(KERNELS, share, groups.ep_group, max_tokens_per_rank=ROOM)


def run_steps(checkpoint: Path, make: Make, overlap: OverlapRule | None) -> list[Tensor]:
    """Run two decode steps of different sizes on every rank; final states of each."""

    def body(rank: int, meetings: Meetings) -> Tensor:
        groups = thread_groups(rank, meetings)
        model = build_model(
            checkpoint,
            groups,
            dtype=torch.bfloat16,
            kernels=KERNELS,
            execution=Execution(dispatcher=make(groups, meetings), overlap=overlap),
        )
        pool = build_kv_pool(model, 256, block_size=8)
        sizes = [NUM_SEQS[rank], NUM_SEQS[-1 - rank]]
        return torch.cat([model(make_step([1] * size, [0] * size), pool) for size in sizes])

    return run_ranks(NUM_RANKS, body)


@pytest.mark.parametrize(
    ("make", "lag"), [(make_gathered, 1), (make_gathered, 2), (make_low_latency, TURNS_LAG)]
)
def test_halves_give_what_whole_steps_give(checkpoint: Path, make: Make, lag: int) -> None:
    whole = run_steps(checkpoint, make, None)
    halves = run_steps(checkpoint, make, OverlapRule(min_tokens=0, lag=lag))
    for actual, expected in zip(halves, whole, strict=True):
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < 0.03  # products of other sizes round otherwise


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_other_lags_would_break_the_library_s_order(checkpoint: Path, lag: int) -> None:
    with pytest.raises(InternalError, match="it must be received first"):
        run_steps(checkpoint, make_low_latency, OverlapRule(min_tokens=0, lag=lag))
