"""What a preemption costs a GPU rank: seconds that the engine thread is held, and GB/s.

    python -m bench.engine.preemption --blocks 256

One request of DeepSeek-V3's shape (61 layers, blocks of 64 tokens, 576 numbers in bf16, 4.5 MB a
block) goes to the host and back: once as a gather and a copy into ordinary memory, which is how a
plain `KVPool.copy_out` does it, once through `PinnedBlocks`.
"""

from __future__ import annotations

import argparse
import random
import time

import torch

from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.memory.pinned_blocks import PinnedBlocks
from engine.streams import Streams

NUM_LAYERS, BLOCK_SIZE, LATENT_DIM = 61, 64, 576


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pool = KVPool(
        2 * options.blocks + 1,
        NUM_LAYERS,
        BLOCK_SIZE,
        KVSpec.shared(LATENT_DIM),
        dtype=torch.bfloat16,
        device="cuda",
    )
    pool.data.normal_()
    pinned = PinnedBlocks(pool, options.blocks, Streams(pool.device))
    name = torch.cuda.get_device_name()
    gb = options.blocks * pool.block_bytes / 1e9
    print(f"{name}: {options.blocks} blocks, {gb:.2f} GB, scattered block ids")
    for repeat in range(options.repeats):
        ids = random.Random(repeat).sample(range(1, pool.num_blocks), options.blocks)
        before = pool.data[ids].clone()
        torch.cuda.synchronize()
        plain_s = _plain(pool, ids)
        out_held_s, out_s, in_held_s, in_s = _through_pinned(pool, pinned, ids)
        assert torch.equal(pool.data[ids], before)
        print(
            f"plain: held {1e3 * plain_s:.1f} ms | pinned out: held {1e3 * out_held_s:.2f} ms, "
            f"done {1e3 * out_s:.1f} ms ({gb / out_s:.0f} GB/s) | in: held "
            f"{1e3 * in_held_s:.2f} ms, done {1e3 * in_s:.1f} ms ({gb / in_s:.0f} GB/s)"
        )


def _plain(pool: KVPool, ids: list[int]) -> float:
    begun = time.perf_counter()
    pool.copy_out(ids)
    return time.perf_counter() - begun


def _through_pinned(
    pool: KVPool, pinned: PinnedBlocks, ids: list[int]
) -> tuple[float, float, float, float]:
    """Seconds: out until the call returned, until done; the same back in."""
    begun = time.perf_counter()
    copy = pinned.copy_out(ids)
    out_held_s = time.perf_counter() - begun
    copy.done.synchronize()
    out_s = time.perf_counter() - begun
    pool.data[ids] = 0
    torch.cuda.synchronize()
    begun = time.perf_counter()
    pinned.copy_in(ids, copy)
    in_held_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    in_s = time.perf_counter() - begun
    pinned.discard(copy)
    return out_held_s, out_s, in_held_s, in_s


if __name__ == "__main__":
    main()
