"""One rank that keeps step with others over gloo, with something wrong: run by `test_slow_ranks`.

Usage: python -m tests.engine.parallel.waits_main RANK WORLD PORT FAULT OUTPUT

Writes its blocks as JSON. Work is slept, so that it takes as long on every machine; what is wrong
takes several times as long as that.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import agree_on_epoch, init_process_groups
from engine.parallel.lockstep import GroupLockstep, RankState
from engine.parallel.rank_flags import open_rank_flags
from engine.parallel.row_formats import ExpertShare, PlainRows
from engine.parallel.wait_recorder import WaitRecorder
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, STEPS_OF_BLOCK
from tests.engine.parallel.slow_way import slow_way

NUM_STEPS = BLOCKS_OF_WINDOW * STEPS_OF_BLOCK + 2
NUM_LAYERS, NUM_TOKENS, EXPERTS_OF_RANK = 2, 8, 2
GAP_S, ATTENTION_S, ROW_S = 2e-3, 2e-3, 1e-4


class Rank:
    """The work of a rank; rank 1 has the fault."""

    def __init__(self, rank: int, num_ranks: int, port: int, fault: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.fault = fault if rank == 1 else ""
        self.is_skewed = fault == "rows"
        address = f"127.0.0.1:{port}"
        dims = ParallelDims(dp=num_ranks, ep=num_ranks, rank=rank)
        self.groups = init_process_groups(dims, address)
        group, epoch = self.groups.ep_group, agree_on_epoch(self.groups.ep_group)
        through = slow_way if self.fault == "link" else (lambda _, host, at: (host, at))
        flags = open_rank_flags(self.groups.boot_group, epoch, address, through=through)
        self.waits = WaitRecorder(num_ranks, flags)
        self.lockstep = GroupLockstep(group, epoch, self.waits)
        share = ExpertShare(
            first=rank * EXPERTS_OF_RANK, num_local=EXPERTS_OF_RANK, num_ranks=num_ranks
        )
        self.dispatcher = AllToAllDispatcher(PlainRows(share), group, self.waits)

    def step(self, number: int) -> None:
        """Do what an engine loop does."""
        time.sleep(GAP_S * (6 if self.fault == "host" else 1))
        if self.fault == "pauses" and number % 10 == 0:
            time.sleep(0.15)
        self.lockstep.exchange(RankState(num_tokens=NUM_TOKENS))
        for _ in range(NUM_LAYERS):
            time.sleep(ATTENTION_S * (4 if self.fault == "attention" else 1))
            self._experts()

    def _experts(self) -> None:
        hidden = torch.ones(NUM_TOKENS, 4)
        spread = torch.arange(NUM_TOKENS) % (EXPERTS_OF_RANK * self.num_ranks)
        ids = spread[:, None].clone()
        if self.is_skewed:  # half of all tokens go to rank 1
            ids[::2] = EXPERTS_OF_RANK
        rows, handle = self.dispatcher.start_dispatch(hidden, ids, torch.ones(ids.shape)).wait()
        (data,) = _rows_of(rows)
        time.sleep(ROW_S * len(data))
        self.dispatcher.start_combine(data, handle, None).wait()


@contextmanager
def closing(rank: Rank) -> Iterator[Rank]:
    """All ranks leave together."""
    yield rank
    rank.groups.boot_group.barrier()
    rank.waits.close()
    rank.groups.destroy()


def _rows_of(rows: Any) -> tuple[torch.Tensor]:
    return (rows.rows_MD,)


def main() -> None:
    """Run the steps, and write what was recorded."""
    rank, num_ranks, port = (int(value) for value in sys.argv[1:4])
    fault, output = sys.argv[4], Path(sys.argv[5])
    with torch.inference_mode(), closing(Rank(rank, num_ranks, port, fault)) as played:
        for number in range(NUM_STEPS):
            played.step(number)
        output.write_text(json.dumps([asdict(block) for block in played.waits.blocks]))


if __name__ == "__main__":
    main()
