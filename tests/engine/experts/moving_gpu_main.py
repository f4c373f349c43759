"""One rank whose experts of 44 MB move to GPUs of its host: run by `test_moves_gpu` as a process.

Usage: python -m tests.engine.experts.moving_gpu_main RANK WORLD PORT OUTPUT HOST_GIB

HOST_GIB: of copies of experts in host memory; 0 for none.
Writes whether every slot holds what it should, and how long steps of a fixed piece of work took
while nothing moved and while something did, in milliseconds. On a CPU, without mapped memory, the
wire is missing and it says so.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from engine.experts.expert_tensors import ExpertTensors
from engine.experts.host_experts import open_host_experts
from engine.experts.placement import placement_map
from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import RebalanceOptions, Rebalancer, Stage
from engine.experts.staging import Staging, box_bytes
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, init_process_groups
from engine.parallel.lockstep import GroupLockstep, RankState
from engine.parallel.nvlink.expert_carrier import open_nvlink_carrier
from engine.streams import Streams
from tests.engine.experts.moving_world import TablePlanner, random_tables, signature

NUM_LAYERS, NUM_EXPERTS, WIDTH, SCALES = 2, 8, 11_010_048, 2688
NUM_STEPS = 400


def main() -> None:
    """Move, and look at every slot."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_devices)
    torch.cuda.set_device(device)
    groups = init_process_groups(
        ParallelDims(dp=world, ep=world, rank=rank),
        f"127.0.0.1:{port}",
        backend="gloo" if world > num_devices else "cpu:gloo,cuda:nccl",
    )
    moving = Rank(groups.ep_group, device, float(sys.argv[5]))
    result = moving.run()
    Path(sys.argv[4]).write_text(json.dumps(result))
    moving.carrier.close()
    groups.destroy()


class Rank:
    """Slots whose numbers say what is in them, and what moves them."""

    def __init__(self, group: RankGroup, device: torch.device, host_gib: float) -> None:
        self.group, self.device = group, device
        num_slots = NUM_EXPERTS + group.size
        self.share = num_slots // group.size
        row = [slot % NUM_EXPERTS for slot in range(num_slots)]
        self.placements = ExpertPlacements(
            [row] * NUM_LAYERS, NUM_EXPERTS, device=device, can_change=True
        )
        mine = row[group.rank * self.share : (group.rank + 1) * self.share]
        self.layers = [
            [
                torch.stack([signature(layer, expert, width) for expert in mine]).to(device)
                for width in (WIDTH, SCALES)
            ]
            for layer in range(NUM_LAYERS)
        ]
        tensors, streams = ExpertTensors(self.layers), Streams(device)
        opened = open_nvlink_carrier(group, device, box_bytes(tensors))
        assert opened is not None, "the ranks cannot reach each other's memory"
        self.carrier, inbox = opened
        tables = random_tables(
            11, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, num_slots=num_slots
        )
        self.host = open_host_experts(
            tensors, [row] * NUM_LAYERS, NUM_EXPERTS, group, gib=host_gib, field="host_gib"
        )
        self.rebalancer = Rebalancer(
            self.placements,
            Staging(tensors, streams, inbox=inbox),
            self.carrier,
            TablePlanner(self.placements, group.size, tables),
            rank=group.rank,
            num_ranks=group.size,
            host=self.host,
            options=RebalanceOptions(interval_steps=40),
        )

    def run(self) -> dict[str, object]:
        """Take steps of a fixed piece of work; what came of it."""
        lockstep, rebalancer = GroupLockstep(self.group, 1), self.rebalancer
        matrix = torch.randn(4096, 4096, device=self.device).bfloat16()
        times: dict[bool, list[float]] = {True: [], False: []}
        host: list[float] = []
        for _ in range(NUM_STEPS):
            began = time.perf_counter()
            word = rebalancer.say()
            said = time.perf_counter()
            group = lockstep.exchange(RankState(num_tokens=1, experts=word))
            heard = time.perf_counter()
            rebalancer.hear(group.experts, has_work=True)
            host.append(said - began + time.perf_counter() - heard)
            is_moving = rebalancer.stage is not Stage.RESTING
            for _ in range(40):
                torch.mm(matrix, matrix)
            torch.cuda.current_stream().synchronize()
            times[is_moving].append(time.perf_counter() - began)
        rebalancer.say()
        torch.cuda.synchronize()
        moved = rebalancer.epoch > 0 and rebalancer.counts.num_retreats == 0
        return {
            "right": moved and self.is_right(),
            "moves": rebalancer.counts.num_moves,
            "host_moves": rebalancer.counts.num_host_moves,
            "rounds": rebalancer.epoch,
            "resting_ms": _spread(times[False][20:]),
            "moving_ms": _spread(times[True]),
            "host_ms": _spread(host[20:]),
        }

    def is_right(self) -> bool:
        """Whether maps and slots are of the placement."""
        first = self.group.rank * self.share
        for layer, placed in enumerate(self.placements.table):
            expected = placement_map(placed, NUM_EXPERTS, self.placements.width)
            if not self.placements.maps[layer].cpu().equal(expected):
                return False
            for part in self.layers[layer]:
                for slot, expert in enumerate(placed[first : first + self.share]):
                    if not part[slot].cpu().equal(signature(layer, expert, part.shape[1])):
                        return False
        return True


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)
        for name, share in places.items()
    }


if __name__ == "__main__":
    main()
