"""Whole steps of ranks that share heads, whose rows and sums go over memory that all of them write.

Threads stand for ranks. What differs from the library's collectives is how sums are rounded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.batch import build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.nvlink.all_gather import GatherShape, NvlinkAllGather
from engine.parallel.nvlink.reduce_scatter import NvlinkReduceScatter, ReduceShape
from engine.request import Request, ScheduledRequest
from runtime.sampling import SamplingParams
from tests.engine.parallel.nvlink.shared_memory import SharedExchange
from tests.engine.parallel.thread_ranks import Meetings, run_ranks, thread_head_groups
from tests.engine.tiny import TINY, tiny_config, write_checkpoint

HIDDEN, LAYERS = TINY["hidden_size"], TINY["num_hidden_layers"]
MOST = 24
"""Tokens of a step, all of them: longer ones are the library's."""
STEPS = ([5], [1], [17, 3], [24], [40], [2, 2, 2])
"""Prompts of each step."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_config())


def schedule(lengths: list[int]) -> list[ScheduledRequest]:
    requests = [
        Request(
            request_id=str(index),
            prompt_token_ids=[(7 * index + 5 * i) % TINY["vocab_size"] for i in range(length)],
            sampling=SamplingParams(temperature=0.0),
            block_table=list(range(1 + 4 * index, 5 + 4 * index)),
        )
        for index, length in enumerate(lengths)
    ]
    return [ScheduledRequest(request, len(request.prompt_token_ids)) for request in requests]


class Watched:
    """Counts what an exchange takes, in the order of calls."""

    def __init__(self, sums: NvlinkReduceScatter, gathers: NvlinkAllGather) -> None:
        self.sums, self.gathers = sums, gathers
        self.taken: list[bool] = []
        self._sums_takes, self._gathers_takes = sums.takes, gathers.takes
        sums.takes = self._note_sum  # type: ignore[method-assign]

    def _note_sum(self, partial_PD: Tensor) -> bool:
        self.taken.append(self._sums_takes(partial_PD))
        return self.taken[-1]


def hidden_states(checkpoint: Path, tp: int, *, by_stores: bool) -> list[list[Tensor]]:
    """Return [T, D] of every step, by rank."""
    max_rows = -(-MOST // tp)
    shared = SharedExchange(
        ReduceShape(num_ranks=tp, max_rows=max_rows, hidden_size=HIDDEN),
        GatherShape(num_ranks=tp, max_rows=max_rows, row_bytes=4 * HIDDEN),
        seed=tp,
    )

    def body(rank: int, meetings: Meetings) -> list[Tensor]:
        groups = thread_head_groups(rank, meetings)
        group, watched = groups.tp_group, None
        if by_stores:
            watched = Watched(*shared.open(rank))
            group = group.exchanging_by(watched.sums, watched.gathers)
        execution = Execution(scatter_tokens=True, tp_group=group)
        model = build_model(checkpoint, groups, dtype=torch.bfloat16, execution=execution)
        assert isinstance(model, DeepseekV3ForCausalLM)
        pool, found = build_kv_pool(model, 64, block_size=16), []
        for lengths in STEPS:
            found.append(model.forward(build_forward_batch(schedule(lengths), 16), pool).float())
            if watched is not None:
                fits = sum(lengths) <= MOST
                assert watched.taken == [fits] * (2 * LAYERS), "two sums a layer"
                watched.taken.clear()
        return found

    return run_ranks(tp, body)


@pytest.mark.parametrize("tp", [2, 4])
def test_steps_are_those_of_collectives(checkpoint: Path, tp: int) -> None:
    expected = hidden_states(checkpoint, tp, by_stores=False)
    for actual in hidden_states(checkpoint, tp, by_stores=True):
        for step, wanted in zip(actual, expected[0], strict=True):
            assert step.shape == wanted.shape
            error = (step - wanted).norm() / wanted.norm()
            assert error < 0.03, "sums are rounded elsewhere, and nothing more"
            assert torch.isfinite(step).all()
