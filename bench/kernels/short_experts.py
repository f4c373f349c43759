"""Experts of a short prefill step: rows in tiles of 128, or masked and streamed.

Run ``python -m bench.kernels.short_experts`` on a Hopper GPU with the `gpu` extra. One layer of
DeepSeek-V3 as one of eight tensor-parallel ranks has it: 256 experts, a slice of each. Choosing
places, permuting, both products and the sum per token, in microseconds; medians of device events.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.device_time import median_seconds
from bench.kernels.fp8 import fp8_of, quantize
from engine.formats.base import run_experts
from engine.formats.stored_weight import StoredWeight
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.parallel.groups import RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.row_formats import AlignedQuantized, ExpertShare
from engine.parallel.short_rows import ShortQuantized
from engine.weights.fp8 import quantize_block

NUM_EXPERTS, TOP_K = 256, 8
HIDDEN, WIDTH = 7168, 256
TOKENS = (16, 32, 64, 128, 256)


def draw_stack(num_experts: int, rows: int, columns: int) -> StoredWeight:
    """Return random block-quantised weights [E, rows, columns]."""
    drawn = [
        quantize_block(torch.randn(rows, columns, device="cuda") / columns**0.5)
        for _ in range(num_experts)
    ]
    numbers, scales = zip(*drawn, strict=True)
    return StoredWeight(torch.stack(numbers), torch.stack(scales))


def make_dispatchers(
    kernels: Kernels, num_experts: int
) -> tuple[LocalDispatcher[Any], LocalDispatcher[Any]]:
    """Return a way with rows in tiles of 128, and one with masked rows, on a rank alone."""
    codec = fp8_of(kernels).rows
    assert codec is not None, kernels.name
    share = ExpertShare(first=0, num_local=num_experts, num_ranks=1)
    aligned = AlignedQuantized(kernels.ops, codec, share)
    short = ShortQuantized(ops=kernels.ops, aligned=aligned, max_tokens=TOKENS[-1])
    return LocalDispatcher(aligned, RankGroup()), LocalDispatcher(short, RankGroup())


@torch.inference_mode()
def main() -> None:
    """Print a line for each number of tokens."""
    kernels = create_kernels("cuda")
    number_format = fp8_of(kernels)
    w13 = draw_stack(NUM_EXPERTS, 2 * WIDTH, HIDDEN)
    w2 = draw_stack(NUM_EXPERTS, HIDDEN, WIDTH)
    print("tokens  tiles of 128  masked  (us)")
    for num_tokens in TOKENS:
        rows = quantize(kernels, torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16())
        scores = torch.rand(num_tokens, NUM_EXPERTS, device="cuda")
        weights, ids = scores.topk(TOP_K, dim=-1)

        def step(dispatcher: LocalDispatcher[Any]) -> torch.Tensor:
            received, plan = dispatcher.start_dispatch(rows, ids, weights).wait()  # noqa: B023
            out = run_experts(number_format, received, w13, w2)
            return dispatcher.start_combine(out, plan, None).wait()

        times = [
            1e6 * median_seconds(lambda way=way: step(way))  # type: ignore[misc]
            for way in make_dispatchers(kernels, NUM_EXPERTS)
        ]
        print(f"{num_tokens:6}  {times[0]:12.0f}  {times[1]:6.0f}")


if __name__ == "__main__":
    main()
