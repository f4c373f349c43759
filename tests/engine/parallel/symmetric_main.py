"""One rank of a group over symmetric memory, on its own GPU: run by `test_symmetric_gpu`.

Usage: python -m tests.engine.parallel.symmetric_main RANK WORLD PORT OUTPUT

Random collectives with up to four in flight, while products of random sizes keep the GPUs at odds
with each other; every result is compared bit by bit. Writes what was done as JSON.
"""

import json
import random
import sys
import time
from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from engine.kernels.create import create_kernels
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, init_process_groups
from engine.parallel.pending import Pending
from engine.parallel.symmetric import SymmetricGroup, SymmetricOptions, open_symmetric_group

HIDDEN = 1024
MAX_BYTES = 2**24
MOST_ROWS = 4096


def draw(device: torch.device, rank: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """Small whole numbers: their sums are exact, in every order and in bfloat16."""
    generator = torch.Generator(device).manual_seed(1000 * number + rank)
    return torch.randint(-8, 9, shape, device=device, generator=generator).bfloat16()


def start(
    group: SymmetricGroup, device: torch.device, number: int, order: random.Random
) -> tuple[Pending[Tensor], Tensor]:
    """Start a random collective; return it with its expected result."""
    ranks = range(group.size)
    columns = order.choice([HIDDEN, 576, 8])
    if order.random() < 0.5:
        rows = order.randint(1, MOST_ROWS // group.size)
        inputs = [draw(device, rank, number, (rows, columns)) for rank in ranks]
        return group.start_all_gather(inputs[group.rank]), torch.cat(inputs)
    rows = order.randint(1, MOST_ROWS // group.size)
    inputs = [draw(device, rank, number, (rows * group.size, columns)) for rank in ranks]
    total = torch.stack([x[group.rank * rows :][:rows].float() for x in inputs]).sum(0)
    return group.start_reduce_scatter(inputs[group.rank]), total.bfloat16()


def run(group: SymmetricGroup, device: torch.device, count: int) -> dict[str, object]:
    """Run random collectives; return how many were right."""
    order, own = random.Random(count), random.Random(group.rank)
    matrix = torch.randn(4096, 4096, device=device).bfloat16()
    flying: deque[tuple[Pending[Tensor], Tensor]] = deque()
    right = 0
    began = time.monotonic()
    for number in range(count):
        flying.append(start(group, device, number, order))
        for _ in range(own.randint(0, 6)):
            matrix[: own.randint(1, 4096)] @ matrix
        if own.random() < 0.05:
            time.sleep(0.01)
        for _ in range(max(0, len(flying) - order.randint(0, 4))):
            pending, expected = flying.popleft()
            right += int(torch.equal(pending.wait(), expected))
    while flying:
        pending, expected = flying.popleft()
        right += int(torch.equal(pending.wait(), expected))
    return {"right": right, "count": count, "seconds": time.monotonic() - began}


def main() -> None:
    """Run every variant and write the results."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    groups = init_process_groups(
        ParallelDims(tp=world, rank=rank), f"127.0.0.1:{port}", backend="cpu:gloo,cuda:nccl"
    )
    group: RankGroup = groups.tp_group
    fused = create_kernels(device).sum_slices
    variants = {
        "driver": SymmetricOptions(max_bytes=MAX_BYTES),
        "driver, fused sum": SymmetricOptions(max_bytes=MAX_BYTES, sum_slices=fused),
        "driver, one slot": SymmetricOptions(max_bytes=MAX_BYTES, num_slots=1, num_transfers=4),
        "kernel": SymmetricOptions(max_bytes=MAX_BYTES, kernel_signals=True),
    }
    results = {}
    with torch.inference_mode():
        for name, options in variants.items():
            opened = open_symmetric_group(group, device, options)
            assert opened is not None
            results[name] = run(opened, device, 300)
            opened.close()
    Path(sys.argv[4]).write_text(json.dumps(results))
    groups.destroy()


if __name__ == "__main__":
    main()
