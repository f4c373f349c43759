"""One rank of `test_torchrun`: meets the others, and says who has come."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from bench.torchrun import rendezvous_of
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dims = ParallelDims(dp=size, ep=size, rank=rank)
    groups = init_process_groups(dims, rendezvous_of(os.environ), backend="gloo")
    ranks = groups.ep_group.all_gather(torch.tensor([rank])).tolist()
    Path(sys.argv[1], f"{rank}.txt").write_text(str(ranks))
    groups.destroy()


if __name__ == "__main__":
    main()
