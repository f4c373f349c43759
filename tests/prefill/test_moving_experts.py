"""Experts move while prompts are computed: the same tokens as where they stand.

Real models, links and maps; threads stand for ranks, with a wire between boxes that can break.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.boot.build import build_kv_pool, build_model
from engine.boot.moves import expert_layers
from engine.execution import Execution
from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import RebalanceOptions, Rebalancer
from engine.experts.staging import Staging
from engine.experts.votes import PlacementMismatchError, StandingExperts, Word
from engine.micro_batches import OverlapRule
from engine.parallel.groups import ProcessGroups
from engine.parallel.lockstep import GroupLockstep, RankState
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.streams import Streams
from prefill.follower import make_batch
from prefill.rank_link import FollowerLink, LeaderLink
from prefill.rank_plan import PlanKind, PlanShape, RankAnswer, StepPlan
from prefill.sender_group import batch_arrays
from runtime.sampling import SamplingParams
from tests.engine.experts.moving_world import TablePlanner, Wire, WireCarrier, random_tables
from tests.engine.parallel.thread_ranks import (
    Meetings,
    run_ranks,
    thread_groups,
    thread_head_groups,
)
from tests.engine.tiny import TINY, tiny_config, write_checkpoint

EXPERTS, SLOTS, VOCAB_SIZE = TINY["n_routed_experts"], 12, TINY["vocab_size"]
BLOCK_SIZE, CHUNK, EPOCH = 4, 7, 7
SHAPE = PlanShape(max_num_tokens=CHUNK, max_num_seqs=1, max_num_blocks=16, num_command_bytes=16)
Tokens = list[int]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_nextn_predict_layers=0)
    return write_checkpoint(tmp_path_factory.mktemp("moving"), config, seed=3)


def prompt(number: int) -> Request:
    """One whose length and tokens are the number's, of a chunk or several."""
    length = 3 + number * 5 % 18
    return Request(
        request_id=str(number),
        prompt_token_ids=[(17 * number + 5 * i * i) % VOCAB_SIZE for i in range(length)],
        sampling=SamplingParams(temperature=0.0, max_tokens=1),
        block_table=list(range(1, 9)),
    )


def chunks(request: Request) -> list[ScheduledRequest]:
    """The steps of a prompt; each is to be run before the next is looked at."""
    lengths, left = [], request.num_tokens
    while left:
        lengths.append(min(left, CHUNK))
        left -= lengths[-1]
    return [ScheduledRequest(request, length) for length in lengths]


def note(results: list[StepResult], tokens: Tokens) -> None:
    """Keep what a prompt samples."""
    for result in results:
        if result.sampled is not None:
            tokens.append(result.sampled.token_id)


@dataclass
class Moving:
    """How experts move."""

    wire: Wire
    timeout_s: float = 30.0


class Rank:
    """A model, and what moves its experts."""

    def __init__(
        self,
        checkpoint: Path,
        groups: ProcessGroups,
        moving: Moving | None,
        execution: Execution | None = None,
    ) -> None:
        placements = ExpertPlacements.alike(
            [slot % EXPERTS for slot in range(SLOTS)], EXPERTS, layers=range(1, 3), can_change=True
        )
        model = build_model(checkpoint, groups, placements=placements, execution=execution)
        self.groups, self.rebalancer = groups, None
        self.kv_pool = build_kv_pool(model, 16, block_size=BLOCK_SIZE)
        self.runner = ModelRunner(model, self.kv_pool, Sampler(VOCAB_SIZE), in_group=True)
        if moving is not None:
            self.rebalancer = self._rebalancer(model, placements, moving)

    def _rebalancer(self, model, placements, moving):  # type: ignore[no-untyped-def]
        layers = expert_layers(model)
        assert layers is not None
        staging, size = Staging(layers, Streams(torch.device("cpu"))), self.groups.ep_group.size
        draw = random_tables(5, num_layers=2, num_experts=EXPERTS, num_slots=SLOTS)
        return Rebalancer(
            placements,
            staging,
            WireCarrier(moving.wire, self.groups.rank, staging),
            TablePlanner(placements, size, draw),
            rank=self.groups.rank,
            num_ranks=size,
            options=RebalanceOptions(interval_steps=1, turn_timeout_s=moving.timeout_s),
        )

    @property
    def turns(self) -> Rebalancer | None:
        return self.rebalancer


def run_heads(rank: Rank, num_prompts: int) -> Tokens:
    """Compute prompts as ranks that split heads do: rank 0 says what comes."""
    group, tokens = rank.groups.tp_group, Tokens()
    if group.rank:
        link = FollowerLink(group, SHAPE, EPOCH, rank.turns)
        while _follow(rank, link):
            pass
        return tokens
    leader = LeaderLink(group, SHAPE, EPOCH, rank.turns)
    for number in range(num_prompts):
        request = prompt(number)
        for item in chunks(request):
            assert leader.exchange(batch_arrays([item], BLOCK_SIZE), b"").refusal is None
            note(rank.runner.launch([item]).collect(), tokens)
            request.num_computed_tokens = item.end
            if number % 5 == 0:
                leader.exchange(None, b"")  # commands, or a heartbeat
    leader.stop()
    return tokens


def _follow(rank: Rank, link: FollowerLink) -> bool:
    plans: list[StepPlan] = []

    def answer(plan: StepPlan) -> RankAnswer:
        plans.append(plan)
        return RankAnswer()

    link.exchange(answer)
    (plan,) = plans
    if plan.batch is not None:
        rank.runner.forward_only(make_batch(plan.batch, BLOCK_SIZE))
    return plan.kind is not PlanKind.STOP


def run_own(rank: Rank, num_prompts: int) -> Tokens:
    """Compute prompts as data-parallel ranks do: each its own, or a dummy."""
    group, tokens = rank.groups.ep_group, Tokens()
    lockstep, turns = GroupLockstep(group, EPOCH), rank.turns or StandingExperts()
    steps = [
        (request, item)
        for number in range(group.rank, num_prompts * (1 + group.rank), 1 + group.rank)
        for request in [prompt(number)]
        for item in chunks(request)
    ]
    while True:
        own = steps.pop(0) if steps else None
        word = turns.say()
        state = RankState(num_tokens=int(own is not None), leaving=not steps, experts=word)
        concluded = lockstep.exchange(state)
        turns.hear(concluded.experts, has_work=concluded.has_work)
        if not concluded.has_work:
            return tokens
        if own is None:
            rank.runner.run_dummy()
            continue
        note(rank.runner.launch([own[1]]).collect(), tokens)
        own[0].num_computed_tokens = own[1].end


Run = Callable[[Rank, int], Tokens]
HEADS = (thread_head_groups, run_heads, Execution())
OWN = (thread_groups, run_own, Execution())
OVERLAPPED = (thread_groups, run_own, Execution(overlap=OverlapRule(min_tokens=2)))
WAYS = pytest.mark.parametrize("way", [HEADS, OWN, OVERLAPPED], ids=["tp", "dp", "dp-overlapped"])


def run_way(
    way: tuple[Callable[[int, Meetings], ProcessGroups], Run, Execution],
    checkpoint: Path,
    moving: Moving | None,
    num_prompts: int,
) -> tuple[list[Tokens], list[Rebalancer]]:
    make_groups, run, execution = way

    def body(number: int, meetings: Meetings) -> tuple[Tokens, Rebalancer | None]:
        rank = Rank(checkpoint, make_groups(number, meetings), moving, execution)
        return run(rank, num_prompts), rank.rebalancer

    results = run_ranks(2, body)
    return [tokens for tokens, _ in results], [one for _, one in results if one is not None]


@WAYS
def test_tokens_stay_while_experts_move(way, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    expected, _ = run_way(way, checkpoint, None, 60)
    tokens, rebalancers = run_way(way, checkpoint, Moving(Wire()), 60)
    assert tokens == expected
    assert len({one.epoch for one in rebalancers}) == 1
    assert rebalancers[0].epoch > 15
    assert rebalancers[0].counts.num_retreats == 0


@WAYS
def test_tokens_stay_while_copies_go_wrong(way, checkpoint: Path) -> None:  # type: ignore[no-untyped-def]
    rng = random.Random(1)
    fates = [0, 0, 0, 0, 0, 1, 2, "lost", "failed", "late", "torn"]
    expected, _ = run_way(way, checkpoint, None, 60)
    broken = Moving(Wire(fate=lambda source, reader: rng.choice(fates)), timeout_s=0.02)
    tokens, rebalancers = run_way(way, checkpoint, broken, 60)
    assert tokens == expected
    assert len({one.epoch for one in rebalancers}) == 1
    assert rebalancers[0].counts.num_retreats > 0
    assert not any(one.problem for one in rebalancers)


def test_a_rank_that_has_missed_a_flip_runs_no_step(checkpoint: Path) -> None:
    class Late(StandingExperts):
        def say(self) -> Word:
            return Word(placement=5, turn=0)

    def body(number: int, meetings: Meetings) -> str:
        group = thread_head_groups(number, meetings).tp_group
        try:
            if number:
                FollowerLink(group, SHAPE, EPOCH, Late()).exchange(lambda plan: RankAnswer())
            else:
                LeaderLink(group, SHAPE, EPOCH).exchange(None, b"")
        except PlacementMismatchError as error:
            return error.message
        return ""

    assert all("rank 1 has experts as in placement" in text for text in run_ranks(2, body))
