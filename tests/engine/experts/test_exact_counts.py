"""The counts of all ranks together are every row of every prompt once, whatever ranks share them.

Threads stand for ranks. The numbers of tokens are odd, so that shares are filled up with padding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.boot.build import build_kv_pool, build_model
from engine.boot.experts import counted_experts
from engine.execution import Execution
from engine.experts.counter import Counts
from engine.experts.placements import ExpertPlacements
from engine.micro_batches import OverlapRule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import ProcessGroups
from engine.prompt_drafts import PromptDrafts
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.parallel.thread_ranks import (
    Meetings,
    run_ranks,
    thread_groups,
    thread_head_groups,
)
from tests.engine.tiny import TINY, tiny_config, write_checkpoint

TOP_K, VOCAB_SIZE = TINY["num_experts_per_tok"], TINY["vocab_size"]
EXPERTS, MTP_LAYER = TINY["n_routed_experts"], TINY["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), tiny_config())


class Rank:
    """A prefill rank whose gates count, the layer for multi-token prediction's too."""

    def __init__(self, checkpoint: Path, groups: ProcessGroups, execution: Execution) -> None:
        model = build_model(checkpoint, groups, with_mtp=True, execution=execution)
        assert isinstance(model, DeepseekV3ForCausalLM)
        placements = ExpertPlacements.alike(range(EXPERTS), EXPERTS, layers=range(1, MTP_LAYER + 1))
        counted = counted_experts(
            model, placements, is_scattered=execution.scatter_tokens is not False
        )
        assert counted is not None
        self.counted, self._is_first = counted, groups.dims.tp_rank == 0
        pool, sampler = build_kv_pool(model, 64, block_size=16), Sampler(VOCAB_SIZE)
        drafts = PromptDrafts(model=model, kv_pool=pool, sampler=sampler, group=groups.tp_group)
        self._runner = ModelRunner(model, pool, sampler, in_group=True, drafts=drafts)

    def step(self, scheduled: list[ScheduledRequest]) -> None:
        if not scheduled:
            self._runner.run_dummy()
        elif self._is_first:
            self._runner.launch(scheduled).collect()
        else:
            self._runner.forward_only(self._runner.prepare(scheduled))
        for item in scheduled:
            item.request.num_computed_tokens = item.end

    def read(self) -> Counts:
        return self.counted.counter.start_reading(self.counted.sharing).read()


def prompts(lengths: list[int]) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=[(11 * index + 5 * i) % VOCAB_SIZE for i in range(length)],
            sampling=SamplingParams(temperature=0.0),
            block_table=list(range(1 + 8 * index, 9 + 8 * index)),
        )
        for index, length in enumerate(lengths)
    ]


def chunked(lengths: list[int], chunk: int) -> list[list[tuple[int, int]]]:
    """Deal prompts out to steps of up to so many tokens each: which request, how many of it."""
    steps: list[list[tuple[int, int]]] = [[]]
    room = chunk
    for index, length in enumerate(lengths):
        while length:
            if not room:
                steps.append([])
                room = chunk
            taken = min(length, room)
            steps[-1].append((index, taken))
            length, room = length - taken, room - taken
    return steps


def run_steps(rank: Rank, lengths: list[int], chunk: int, *, num_steps: int = 0) -> None:
    requests, plan = prompts(lengths), chunked(lengths, chunk) if lengths else []
    for number in range(max(len(plan), num_steps)):
        parts = plan[number] if number < len(plan) else []
        rank.step([ScheduledRequest(requests[index], count) for index, count in parts])


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_that_split_heads_count_every_row_once(
    checkpoint: Path, tp: int, scatters: bool, overlaps: bool
) -> None:
    lengths = [3, 17, 1, 26]
    execution = Execution(
        scatter_tokens=scatters and tp > 1, overlap=OverlapRule(min_tokens=2) if overlaps else None
    )

    def body(number: int, meetings: Meetings) -> tuple[Counts, Counts]:
        rank = Rank(checkpoint, thread_head_groups(number, meetings), execution)
        run_steps(rank, lengths, chunk=13)
        return rank.read(), rank.counted.counter.start_reading().read()

    together, alone = zip(*run_ranks(tp, body), strict=True)
    for counts in together:
        assert (counts.sum(axis=1) == sum(lengths) * TOP_K).all()
        assert (counts == together[0]).all()
    if scatters and tp > 1:
        assert (sum(alone) == together[0]).all()
        assert all(counts.sum() < together[0].sum() for counts in alone)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_number_of_tokens_is_counted_as_a_rank_alone_counts_it(
    checkpoint: Path, tp: int
) -> None:
    def body(number: int, meetings: Meetings) -> list[Counts]:
        rank = Rank(checkpoint, thread_head_groups(number, meetings), Execution())
        counts = []
        for length in range(1, 10):
            run_steps(rank, [length], chunk=length)
            counts.append(rank.read())
        return counts

    (alone,) = run_ranks(1, body)
    for counts in run_ranks(tp, body):
        assert all((here == there).all() for here, there in zip(counts, alone, strict=True))


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 25), max_size=2), min_size=2, max_size=2),
    chunk=st.integers(5, 30),
    overlaps=st.booleans(),
)
def test_ranks_with_prompts_of_their_own_count_these(
    checkpoint: Path, lengths: list[list[int]], chunk: int, overlaps: bool
) -> None:
    num_steps = max(len(chunked(own, chunk)) for own in lengths)
    execution = Execution(overlap=OverlapRule(min_tokens=2) if overlaps else None)

    def body(number: int, meetings: Meetings) -> Counts:
        rank = Rank(checkpoint, thread_groups(number, meetings), execution)
        run_steps(rank, lengths[number], chunk, num_steps=num_steps)
        return rank.read()

    for own, counts in zip(lengths, run_ranks(len(lengths), body), strict=True):
        assert (counts.sum(axis=1) == sum(own) * TOP_K).all()
