"""One rank over gloo that dispatches in fixed shapes: run by `test_masked_gathered` as a process.

Usage: python -m tests.engine.parallel.gathered_main RANK WORLD PORT
"""

import sys

import torch

from engine.kernels.portable import portable_kernels
from engine.kernels.reference import quantize_rows
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.pending import Ready
from tests.engine.parallel.expert_world import (
    WORST_ERROR,
    World,
    relative_error,
    run_experts,
    spread_slots,
)


@torch.inference_mode()
def main() -> None:
    """Dispatch and combine a few steps, two of them in flight at a time."""
    rank, size, port = (int(value) for value in sys.argv[1:4])
    torch.set_num_threads(1)
    groups = init_process_groups(
        ParallelDims(dp=size, ep=size, rank=rank), f"127.0.0.1:{port}", timeout_s=240
    )
    num_tokens = [(5 * number) % 7 for number in range(size)]
    world = World(num_ranks=size, slots=spread_slots(288), num_tokens=num_tokens)
    dispatcher = MaskedGatheredDispatcher(
        portable_kernels(has_fp8=True),
        world.share,
        groups.ep_group,
        max_tokens_per_rank=world.max_tokens,
    )
    for first in (0, 2):
        steps = [world.tokens(rank, first + number) for number in range(2)]
        arriving = [
            dispatcher.start_dispatch(quantize_rows(hidden), ids, weights)
            for hidden, ids, weights, _ in steps
        ]
        leaving = []
        for pending, (*_, own) in zip(arriving, steps, strict=True):
            rows, handle = pending.wait()
            result = run_experts(rows, world, rank)
            leaving.append(dispatcher.start_combine(result, handle, Ready(own)))
        for number, pending in enumerate(leaving):
            error = relative_error(pending.wait(), world.expected(rank, first + number))
            assert error < WORST_ERROR, (rank, first + number, error)
    groups.ep_group.barrier()
    groups.destroy()


if __name__ == "__main__":
    main()
