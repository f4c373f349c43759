"""One rank of a Llama instance over gloo: run by `test_llama_ranks` as a process of its own.

Usage: python -m tests.engine.parallel.llama_main RANK WORLD PORT CHECKPOINT OUTPUT

Runs the modes one after another, and writes {mode: result} as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from engine.boot.build import build_kv_pool, build_model
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from tests.engine.parallel.rank_main import own_tokens, same_tokens_on_all

MODES = {
    "tp": {"tp": 2},
    "tp scattered": {"tp": 2, "ep": 2},
    "dp": {"dp": 2, "ep": 2},
}


def main() -> None:
    """Run the modes and write the results."""
    rank, _, port = (int(value) for value in sys.argv[1:4])
    checkpoint, output = Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    results = {}
    for number, (mode, axes) in enumerate(MODES.items()):
        dims = ParallelDims(**axes, rank=rank)
        groups = init_process_groups(dims, f"127.0.0.1:{port + number}", timeout_s=120)
        run = same_tokens_on_all if dims.tp > 1 else own_tokens
        shape = build_kv_pool(build_model(checkpoint, groups), 1).data.shape
        results[mode] = {"tokens": run(checkpoint, groups), "pool": list(shape)}
        groups.boot_group.barrier()
        groups.destroy()
    output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
