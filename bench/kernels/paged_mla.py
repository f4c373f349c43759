"""Paged MLA on one GPU: FlashMLA against every tile of our kernel, in bfloat16 and FP8.

Run ``python -m bench.kernels.paged_mla --json OUT.json`` on a Hopper GPU with the `gpu` extra;
without FlashMLA ours is timed alone. Queries and latents are random, blocks are shuffled; each
result is compared with the reference before it is timed. Times are medians of replayed graphs of
several calls, each over another layer of a pool; the schedule, made once a step, is timed apart.
The bound is of the GPU's data sheet: operations over its bfloat16 peak, latents once over its
memory's bandwidth; a GPU without a sheet here gets no share.

``--suffix`` times prefill's case instead: new tokens behind a long context, of a rank's heads.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels.decode_layer import DTYPES, measure
from engine.attention import flash_mla
from engine.attention.latent_storage import to_storage
from engine.attention.paged_mla.attention import PagedMLA
from engine.attention.paged_mla.tiles import PagedTile, PoolShape, candidates
from engine.attention.paged_queries import PagedQueries, QueryCounts
from engine.attention.paged_reference import paged_attention
from engine.formats.triton_gemm.limits import DeviceLimits
from experts.data_sheets import find_sheet

DEVICE = torch.device("cuda")
RANK, LATENT, BLOCK_SIZE, SCALE, NUM_LAYERS = 512, 576, 64, 0.1352338, 4
TOLERANCE = {"bf16": 1e-2, "fp8": 6e-2}
"""Relative, by norms: probabilities in bfloat16; FlashMLA rounds queries to e4m3 as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Sequences of equal length, in every layer of a pool."""

    kv: str
    q_THL: Tensor
    layers: list[Tensor]
    queries: PagedQueries

    @property
    def operations(self) -> float:
        """Of attention to one layer: 2 per (visible pair, head, number)."""
        lens, most = self.queries.seq_lens_S, self.queries.most
        pairs = int((lens * most - most * (most - 1) // 2).sum())
        return 2.0 * pairs * self.q_THL.shape[1] * (LATENT + RANK)

    @property
    def num_bytes(self) -> float:
        """Of one layer's latents, queries and results."""
        latents = int(self.queries.seq_lens_S.sum()) * LATENT * self.layers[0].element_size()
        rows = self.q_THL.shape[0] * self.q_THL.shape[1]
        return latents + 2.0 * rows * (LATENT + RANK)

    def describe(self, seconds: float) -> dict[str, float | None]:
        """Return rates, and the share of the larger bound; None for a GPU without a sheet."""
        sheet = find_sheet(torch.cuda.get_device_name(DEVICE))
        share = None
        if sheet is not None:
            by_operations = self.operations / sheet.rates.attention
            share = max(by_operations, self.num_bytes / sheet.rates.memory) / seconds
        return {
            "us": seconds * 1e6,
            "tflops": self.operations * 1e-12 / seconds,
            "gb_per_s": self.num_bytes * 1e-9 / seconds,
            "share_of_bound": share,
        }


def draw_step(num_seqs: int, num_queries: int, context: int, num_heads: int, kv: str) -> Step:
    """Draw a step whose sequences have `context` positions, the queries' own included."""
    per_seq = -(-context // BLOCK_SIZE)
    shape = (num_seqs * per_seq + 1, NUM_LAYERS, BLOCK_SIZE, LATENT)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE).to(DTYPES[kv])
    for block in pool:
        block.copy_(to_storage(torch.randn(block.shape, device=DEVICE), pool.dtype))
    tables = (torch.randperm(num_seqs * per_seq, device=DEVICE) + 1).int()
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * num_queries
    spans = [(num_queries, context)] * num_seqs
    counts = QueryCounts(
        cu_seqlens_q=starts, most=num_queries, lengths=spans, total=num_seqs * num_queries
    )
    q_THL = torch.randn(num_seqs * num_queries, num_heads, LATENT, device=DEVICE) * 0.3
    return Step(
        kv=kv,
        q_THL=q_THL.bfloat16(),
        layers=[pool[:, layer] for layer in range(NUM_LAYERS)],
        queries=PagedQueries(
            block_tables_SB=tables.view(num_seqs, per_seq),
            seq_lens_S=torch.full((num_seqs,), context, dtype=torch.int32, device=DEVICE),
            counts=counts if num_queries > 1 else None,
        ),
    )


Attend = Callable[[Tensor], Tensor]
"""Attends to one layer."""


def rivals(step: Step, num_tiles: int) -> Iterator[tuple[str, Attend, Callable[[], object]]]:
    """Yield names, what attends, and what plans: FlashMLA if it runs, then tiles of ours."""
    queries, heads, cache = step.queries, step.q_THL.shape[1], step.layers[0]
    library = flash_mla.FlashMLA() if flash_mla.is_available() else None
    if library is not None and library.takes_queries(queries, cache.dtype):
        theirs = library.plan(queries, heads, cache.dtype)
        schedule = theirs.schedule
        assert schedule is not None
        yield (
            "FlashMLA",
            lambda layer: library.paged_attention(step.q_THL, layer, theirs, schedule, SCALE),
            lambda: library.plan(queries, heads, cache.dtype),
        )
    limits = DeviceLimits.of(DEVICE)
    found = candidates(limits, heads * queries.most, PoolShape.of(cache))
    for tile in found[:num_tiles]:
        yield (_name(tile), *_ours(step, PagedMLA(limits, tile)))


def _ours(step: Step, kernel: PagedMLA) -> tuple[Attend, Callable[[], object]]:
    planned = kernel.plan(step.queries, step.layers[0], step.q_THL.shape[1])
    return (
        lambda layer: kernel.paged_attention(step.q_THL, layer, planned, RANK, SCALE),
        lambda: kernel.plan(step.queries, step.layers[0], step.q_THL.shape[1]),
    )


def _name(tile: PagedTile) -> str:
    values = {**asdict(tile), "is_hopper": None, "per_sm": None}
    sizes = " ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    return f"ours, for Hopper: {sizes}" if tile.is_hopper else f"ours: {sizes}"


def relative_error(step: Step, attend: Attend) -> float:
    """Return how far the first sequences' result is from the reference's, by norms."""
    few = min(4, step.queries.seq_lens_S.shape[0])
    num_rows = few * min(step.queries.most, 8)
    some = step.queries
    if some.counts is None:
        some = replace(
            some, block_tables_SB=some.block_tables_SB[:few], seq_lens_S=some.seq_lens_S[:few]
        )
    wide = step.q_THL[:num_rows].float()
    expected = paged_attention(wide, step.layers[0], some, RANK, SCALE)
    actual = attend(step.layers[0])[:num_rows].float()
    return float((actual - expected).norm() / expected.norm())


def measure_step(what: str, step: Step, num_tiles: int, calls: int) -> list[dict[str, Any]]:
    """Check and time everything on one step; shares are of FlashMLA's speed."""
    results: list[dict[str, Any]] = []
    theirs: float | None = None
    for name, attend, plan in rivals(step, num_tiles):
        row: dict[str, Any] = {"case": what, "kv": step.kv, "kernel": name}
        results.append(row)
        row["relative_error"] = relative_error(step, attend)
        if not row["relative_error"] < TOLERANCE[step.kv]:
            row["not_timed"] = "wrong"
            continue
        us, _ = measure(partial(_attend_to_all, attend, step.layers * calls))
        seconds = us * 1e-6 / (calls * NUM_LAYERS)
        theirs = seconds if name == "FlashMLA" else theirs
        row |= step.describe(seconds)
        row["share_of_flash_mla"] = None if theirs is None else theirs / seconds
        if step.queries.counts is None:
            row["plan_us"], _ = measure(plan)
    return results


def _attend_to_all(attend: Attend, layers: list[Tensor]) -> None:
    for layer in layers:
        attend(layer)


def main() -> None:
    """Measure, print a line each, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--steps", default="64x2048,128x4096", help="sequences x context, a list")
    parser.add_argument("--heads", type=int, default=128, help="of a rank")
    parser.add_argument("--kv", default="bf16,fp8", help="of the pool, a list")
    parser.add_argument("--tiles", type=int, default=2, help="of ours, the best guesses first")
    parser.add_argument("--suffix", default="", help="new tokens x context, a list, instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name()}]
    with torch.inference_mode():
        for what in (arguments.suffix or arguments.steps).split(","):
            first, context = (int(number) for number in what.split("x"))
            sizes = (1, first) if arguments.suffix else (first, 1)
            for kv in arguments.kv.split(","):
                step = draw_step(*sizes, context, arguments.heads, kv)
                calls = 1 if arguments.suffix else 4
                for row in measure_step(what, step, arguments.tiles, calls):
                    results.append(row)
                    print(json.dumps(row), flush=True)
                del step
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
