"""One rank of a real instance over NCCL: run by `test_ranks_gpu` as a process of its own.

Usage: python -m tests.engine.parallel.gpu_rank_main RANK WORLD PORT CHECKPOINT OUTPUT

All layouts of one FP8 model with the device's own kernels, then writes {axes: distances} as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from tests.engine.parallel.layouts import Trial


def main() -> None:
    """Compare, and write how far the layouts are apart."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    checkpoint, output = Path(sys.argv[4]), Path(sys.argv[5])
    torch.cuda.set_device(rank)
    results = {}
    for number, axes in enumerate(({"tp": world, "ep": world}, {"dp": world, "ep": world})):
        groups = init_process_groups(
            ParallelDims(**axes, rank=rank),
            f"127.0.0.1:{port + number}",
            backend="cpu:gloo,cuda:nccl",
        )
        trial = Trial(checkpoint=checkpoint, groups=groups, fp8=True, device=f"cuda:{rank}")
        results["dp" if "dp" in axes else "tp"] = {
            **trial.compare_layouts(),
            "experts": trial.compare_experts(),
        }
        torch.cuda.synchronize()
        groups.ep_group.barrier()
        groups.destroy()
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
