"""Attention over pages by our own kernel, beside FlashMLA where it is installed.

Run ``python -m benchmarks.paged_attention --json OUT.json`` on a GPU. Heads, latents and blocks are
those of DeepSeek-V3 (128 heads, 576 numbers, blocks of 64); contexts of a row are equal, blocks are
shuffled, latents and queries are random. Every tile that the GPU can hold is timed, the one that
serves first, each in a CUDA graph: the median of replays by device events, without the plan of
parts, which a step makes once for all its layers. Results are compared with FlashMLA's, or with
the reference's. GB/s are the latents' bytes alone.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode_layer import DEVICE, fill, measure
from engine.kernels import flash_mla, paged_reference
from engine.kernels.paged_mla.attention import PagedMLA
from engine.kernels.paged_mla.tiles import PagedTile, candidates
from engine.kernels.paged_queries import PagedQueries
from engine.kernels.triton_gemm.limits import DeviceLimits
from engine.memory.kv_pool import KVPool

NUM_HEADS, LATENT, RANK, BLOCK_SIZE = 128, 576, 512, 64
SCALE = 0.1352338
CASES = [(64, 2048), (128, 4096), (8, 32768)]
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def make_pages(num_seqs: int, context: int, dtype: torch.dtype) -> tuple[Tensor, PagedQueries]:
    """Return a layer of a filled pool, and one query of each sequence."""
    per_seq = -(-context // BLOCK_SIZE)
    pool = KVPool(1 + num_seqs * per_seq, 1, BLOCK_SIZE, LATENT, dtype=dtype, device=DEVICE)
    fill(pool)
    order = np.random.default_rng(0).permutation(num_seqs * per_seq) + 1
    tables = torch.from_numpy(order.astype(np.int32).reshape(num_seqs, per_seq)).to(DEVICE)
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE)
    return pool.layer(0), PagedQueries(block_tables_SB=tables, seq_lens_S=lengths)


def time_tile(
    tile: PagedTile, q_SHL: Tensor, cache: Tensor, queries: PagedQueries, wanted: Tensor
) -> dict[str, Any]:
    """Time our kernel with one tile; what does not compile or is wrong is said."""
    kernel = PagedMLA(DeviceLimits.of(DEVICE), tile)
    found: dict[str, Any] = {"tile": str(tile)}
    try:
        planned = kernel.plan(queries, cache, NUM_HEADS)
        actual = kernel.paged_attention(q_SHL, cache, planned, RANK, SCALE)
        difference = (actual.float() - wanted.float()).norm() / wanted.float().norm()
        us, _ = measure(lambda: kernel.paged_attention(q_SHL, cache, planned, RANK, SCALE))
    except Exception as error:  # a tile that the compiler refuses must not end the others
        return found | {"error": f"{type(error).__name__}: {error}"[:300]}
    return found | {"us": us, "relative_difference": float(difference)}


def time_case(num_seqs: int, context: int, name: str) -> dict[str, Any]:
    """Time all tiles on one shape, and FlashMLA."""
    cache, queries = make_pages(num_seqs, context, DTYPES[name])
    q_SHL = torch.randn(num_seqs, NUM_HEADS, LATENT, device=DEVICE).bfloat16()
    report: dict[str, Any] = {"num_seqs": num_seqs, "context": context, "kv_dtype": name}
    library = flash_mla.FlashMLA() if flash_mla.is_available() else None
    if library is not None and library.takes(cache):
        plan = library.schedule(queries.seq_lens_S, NUM_HEADS, cache.dtype)
        wanted = library.paged_attention(q_SHL, cache, queries, plan, SCALE)
        us, _ = measure(lambda: library.paged_attention(q_SHL, cache, queries, plan, SCALE))
        report["flash_mla_us"] = us
    else:
        wanted = paged_reference.paged_attention(q_SHL, cache, queries, RANK, SCALE)
    limits, is_fp8 = DeviceLimits.of(DEVICE), cache.dtype.itemsize == 1
    tiles = candidates(limits, NUM_HEADS, latent_dim=LATENT, is_fp8=is_fp8)
    report["tiles"] = rows = [time_tile(tile, q_SHL, cache, queries, wanted) for tile in tiles]
    for row in rows:
        if "us" in row:
            row["gb_s"] = num_seqs * context * LATENT * cache.element_size() / row["us"] / 1e3
            row["share_of_flash_mla"] = report.get("flash_mla_us", 0.0) / row["us"] or None
    return report


def main() -> None:
    """Print a line for every tile of every case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    reports = []
    for num_seqs, context in CASES:
        for name in DTYPES:
            reports.append(report := time_case(num_seqs, context, name))
            print(f"{num_seqs} x {context} {name}: FlashMLA {report.get('flash_mla_us')} us")
            for row in report["tiles"]:
                print("  ", row, flush=True)
    if arguments.json is not None:
        gpu = torch.cuda.get_device_name(DEVICE)
        arguments.json.write_text(json.dumps({"gpu": gpu, "rows": reports}, indent=1))


if __name__ == "__main__":
    main()
