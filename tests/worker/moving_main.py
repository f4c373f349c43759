"""One rank whose experts move while it decodes: run by `test_moving_experts` as a process.

Usage: python -m tests.worker.moving_main RANK WORLD PORT CHECKPOINT OUTPUT MODE

MODE: "standing" (nothing moves), "random" (placements drawn anew, one after another), "planned" (by
what experts get), "faults" (as random, over a wire that loses, tears and delays), "kill" (as
random, and the last rank dies), "host" (as random, from each rank's own host memory), "half" (the
same of one layer of two). Writes tokens of all turns and what moved as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from engine.batch import ForwardBatch
from engine.boot.build import build_kv_pool, build_model
from engine.boot.experts import count_experts
from engine.boot.moves import OpenMoves, open_moves
from engine.config import DeepseekV3Config
from engine.experts.group_planner import GroupPlanner
from engine.experts.placements import ExpertPlacements
from engine.experts.planner import Planner
from engine.experts.rebalancer import RebalanceOptions, Rebalancer
from engine.experts.side_thread import SideThread
from engine.experts.votes import ExpertTurns, StandingExperts
from engine.layers.moe import MoE
from engine.options import EngineOptions, KVOptions, TokenSteps
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, agree_on_epoch, init_process_groups
from engine.parallel.lockstep import GroupLockstep, RankState
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.streams import Streams
from experts.even_plan import even_rounds
from experts.windows import LoadWindows
from kv_transfer.transport import peer_name
from kv_transfer.transports import TransportOptions, create_transport
from runtime.errors import PeerLostError
from runtime.faults import parse_faults
from runtime.sampling import SamplingParams
from tests.engine.experts.moving_world import TablePlanner, random_tables
from worker.expert_carrier import TransportCarrier

NUM_EXPERTS, NUM_TOKENS = 8, 24
FAULTS = "drop=0.03,fail=0.04,partial=0.04,late=0.04@0.3,delay=0.1@0.02,seed=4"
PIECE_BYTES = 10_000
"""Three pieces of an expert."""
HOST_BYTES = {"host": 1_000_000, "half": 300_000}
"""An expert takes 25 KB, and a layer 197 KB."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)


def options_of(mode: str) -> EngineOptions | None:
    """Return what a mode holds in host memory."""
    if mode not in HOST_BYTES:
        return None
    kv, gib = KVOptions(num_blocks=64), HOST_BYTES[mode] / 2**30
    return EngineOptions(steps=TokenSteps(), kv=kv, rebalance_host_gib=gib)


def skew(model: torch.nn.Module) -> None:
    """Have most tokens choose few experts, and others in each layer."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for number, layer in enumerate(layers):
        bias = layer.gate.e_score_correction_bias
        bias.data[(number * 3) % NUM_EXPERTS] += 0.4
        bias.data[(number * 3 + 1) % NUM_EXPERTS] += 0.3


def planner_of(mode: str, moves: OpenMoves, side: SideThread, windows: LoadWindows) -> Planner:
    """Make the plans of a mode."""
    placements, group = moves.placements, moves.side_group
    if mode == "planned":
        make = partial(even_rounds, num_ranks=group.size, min_gain=0.01)
        planner = GroupPlanner(group, side, placements, make)
        windows.follow(4, planner.take_window)
        return planner
    tables = random_tables(
        7,
        num_layers=placements.num_layers,
        num_experts=NUM_EXPERTS,
        num_slots=placements.num_physical_experts,
    )
    return TablePlanner(placements, group.size, tables)


class Rank:
    """A model, and requests in turns: the same prompts again and again."""

    def __init__(self, groups: ProcessGroups, checkpoint: Path, mode: str, num_slots: int) -> None:
        config = DeepseekV3Config.from_dir(checkpoint)
        self.groups, self.mode = groups, mode
        placements = ExpertPlacements.alike(
            [slot % NUM_EXPERTS for slot in range(num_slots)],
            NUM_EXPERTS,
            layers=config.expert_layers(),
            can_change=True,
        )
        self.model = build_model(checkpoint, groups, placements=placements)
        skew(self.model)
        counter = count_experts(self.model)
        assert counter is not None
        self.windows = LoadWindows(counter)
        epoch = agree_on_epoch(groups.ep_group)
        self.lockstep = GroupLockstep(groups.ep_group, epoch)
        self.kv_pool = build_kv_pool(self.model, 64, block_size=8)
        self.runner = ModelRunner(self.model, self.kv_pool, Sampler(config.vocab_size))
        self.rebalancer: Rebalancer | None = None
        self.turns: ExpertTurns = StandingExperts()
        if mode != "standing":
            self._move(placements, epoch)

    def _move(self, placements: ExpertPlacements, epoch: int) -> None:
        streams = Streams(torch.device("cpu"))
        moves = open_moves(
            self.model, placements, streams, options_of(self.mode), piece_bytes=PIECE_BYTES
        )
        assert moves is not None
        self.side = SideThread("moves")
        names = [peer_name("decode-0", epoch, rank) for rank in range(self.groups.dims.dp)]
        faults = parse_faults(FAULTS if self.mode == "faults" else "")
        self.transport = create_transport(
            "loopback",
            local_name=names[self.groups.rank],
            host="127.0.0.1",
            options=TransportOptions(faults=faults),
        )
        carrier = TransportCarrier(
            self.transport, moves.staging, self.side, moves.side_group, names=names
        )
        self.rebalancer = self.turns = Rebalancer(
            placements,
            moves.staging,
            carrier,
            planner_of(self.mode, moves, self.side, self.windows),
            rank=self.groups.rank,
            num_ranks=self.groups.dims.dp,
            host=moves.host,
            options=RebalanceOptions(
                interval_steps=4, turn_timeout_s=2.0 if self.mode == "faults" else 30.0
            ),
        )

    def run(self, turn: int, *, until: float) -> list[list[int]] | None:
        """Decode this turn's prompts; None where all ranks' time was over before it began."""
        seeds = [turn * 31 + self.groups.rank * 7 + i for i in range(2)]
        prompts = [[(5 * i * i + 3 * i + s) % 128 for i in range(9 + s % 5)] for s in seeds]
        requests = [
            Request(request_id=str(i), prompt_token_ids=list(prompt), sampling=GREEDY)
            for i, prompt in enumerate(prompts)
        ]
        for i, request in enumerate(requests):
            request.block_table = list(range(1 + 16 * i, 17 + 16 * i))
        is_first = True
        while True:
            scheduled = [
                ScheduledRequest(request, request.num_tokens - request.num_computed_tokens)
                for request in requests
                if len(request.output_token_ids) < NUM_TOKENS
            ]
            wants = bool(scheduled) and not (is_first and time.monotonic() > until)
            word = self.turns.say()
            state = RankState(num_tokens=len(scheduled), leaving=not wants, experts=word)
            group = self.lockstep.exchange(state)
            self.turns.hear(group.experts, has_work=group.has_work)
            if is_first and group.any_leaving:
                return None
            is_first = False
            if not group.has_work:
                return [request.output_token_ids for request in requests]
            if scheduled:
                for result in self.runner.execute(scheduled):
                    assert result.sampled is not None
                    result.request.num_computed_tokens = result.request.num_tokens
                    result.request.output_token_ids.append(result.sampled.token_id)
            else:
                with torch.inference_mode():
                    self.model(ForwardBatch.dummy(), self.kv_pool)
            self.windows.passed()


def main() -> None:
    """Run the mode, and write what came of it."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    checkpoint, output, mode = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    num_turns, seconds = int(sys.argv[7]), float(sys.argv[8])
    torch.set_num_threads(1)
    dims = ParallelDims(dp=world, ep=world, rank=rank)
    groups = init_process_groups(dims, f"127.0.0.1:{port}", timeout_s=120)
    body = Rank(groups, checkpoint, mode, num_slots=12)
    tokens: list[list[list[int]]] = []
    resident: list[int] = []
    result: dict[str, object] = {"tokens": tokens, "error": "", "resident_kib": resident}
    until = time.monotonic() + seconds
    kill_at = num_turns // 2 if mode == "kill" and rank == world - 1 else -1
    try:
        for turn in range(num_turns):
            if turn == kill_at:
                os._exit(0)
            given = body.run(turn, until=until)
            if given is None:
                break
            tokens.append(given)
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4)
    except PeerLostError as error:
        result["error"] = type(error).__name__
    if body.rebalancer is not None:
        counts = body.rebalancer.counts
        result |= {
            "epoch": body.rebalancer.epoch,
            "retreats": counts.num_retreats,
            "plans": counts.num_plans,
            "moves": counts.num_moves,
            "host_moves": counts.num_host_moves,
            "problem": body.rebalancer.problem,
            "threads": len(sys._current_frames()),
        }
    output.write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
