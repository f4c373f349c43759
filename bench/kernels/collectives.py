"""All-gather, reduce-scatter and combine between the GPUs of one host, alone and behind products.

On a host with N GPUs run ``python -m torch.distributed.run --nproc-per-node N -m
bench.kernels.collectives --json OUT.json``. Each size is the whole tensor: what an all-gather
returns, what a reduce-scatter is given; a combine has as many rows of sums, which it makes itself
(`bench.kernels.pair_sums`). Compared: NCCL as it is, with few blocks and by its policies, and our
own by NVLink stores, one in flight, of which a receive is launched behind the products. "GB/s" is
what a GPU sends, (N - 1) / N of the size, over the time of the slowest rank; a combine by stores
sends less. "with GEMM" starts the collective, launches products that take half as long again, and
waits: what it takes longer than the products alone is exposed. Results are checked before they are
timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.kernels.device_time import median_seconds
from bench.kernels.fp8 import fp8_of, quantize
from bench.kernels.pair_sums import draw_pairs, start_combine, sum_of
from bench.torchrun import rendezvous_of
from engine.boot.jit_cache import use_jit_cache
from engine.formats.stored_weight import StoredWeight
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, init_process_groups
from engine.parallel.nvlink.all_gather import GatherShape
from engine.parallel.nvlink.open import open_nvlink_exchange
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.pending import Pending
from engine.weights.fp8 import quantize_block

HIDDEN = 7168
MEGABYTE = 2**20
GEMM = (16384, 7168, 2048)
"""Rows, columns and depth: an output projection of one of eight ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One collective of one variant at one size; times in microseconds.

    Attributes:
        worst_error: largest error relative to the largest expected value; 0 for an all-gather.
        gemm_us: the products alone.
        both_us: the products with the collective behind them.
    """

    what: str
    variant: str
    megabytes: float
    us: float
    gb_per_s: float
    worst_error: float
    gemm_us: float
    both_us: float

    @property
    def exposed_us(self) -> float:
        """What the collective adds to the products."""
        return self.both_us - self.gemm_us


class Bench:
    """One rank's measurements."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._kernels = create_kernels("cuda")
        self._gemm = _make_gemm(self._kernels)
        for is_turn in (group.rank == 0, group.rank != 0):
            if is_turn:
                self._gemm()  # one rank compiles, the others find it in the cache
            torch.cuda.synchronize()
            group.barrier()

    def run(self, what: str, variant: str, collectives: RankGroup, megabytes: int) -> Result:
        """Check and time one collective."""
        rows = megabytes * MEGABYTE // (2 * HIDDEN * self._group.size) * self._group.size
        error = self._check(what, collectives, rows)
        inputs = self._draw(what, rows, self._group.rank)
        start = _starter(what, collectives, self._kernels)
        alone = self._slowest(lambda: start(inputs).wait())
        count = max(1, round(1.5 * alone / self._slowest(self._gemm)))

        def products() -> None:
            for _ in range(count):
                self._gemm()

        def both() -> None:
            flying = start(inputs)
            products()
            flying.wait()

        sent = rows * HIDDEN * 2 * (self._group.size - 1) / self._group.size
        return Result(
            what=what,
            variant=variant,
            megabytes=megabytes,
            us=alone * 1e6,
            gb_per_s=sent / alone / 1e9,
            worst_error=error,
            gemm_us=self._slowest(products) * 1e6,
            both_us=self._slowest(both) * 1e6,
        )

    def _draw(self, what: str, rows: int, rank: int, *, seed: int = 0) -> Any:
        if what == "combine":
            return draw_pairs(rows, HIDDEN, replace(self._group, rank=rank), seed=seed)
        own_rows = rows // self._group.size if what == "all-gather" else rows
        generator = torch.Generator(self._device).manual_seed(1000 * seed + rank)
        return torch.randn(own_rows, HIDDEN, device=self._device, generator=generator).bfloat16()

    def _check(self, what: str, collectives: RankGroup, rows: int) -> float:
        """Compare with float32 on fresh inputs, several in flight; returns the worst error."""
        start, ranks = _starter(what, collectives, self._kernels), range(self._group.size)
        worst = 0.0
        seeds, in_flight = range(3), 1 if collectives.sums is not None else 3
        flying = [self._start(start, what, rows, seed) for seed in seeds[:in_flight]]
        for seed in seeds:
            if seed >= len(flying):
                torch.cuda.synchronize()
                self._group.barrier()  # nobody reads what was gathered before
                flying.append(self._start(start, what, rows, seed))
            actual = flying[seed].wait()
            if what == "all-gather":
                expected = torch.cat([self._draw(what, rows, rank, seed=seed) for rank in ranks])
                assert torch.equal(actual, expected), f"{what} returned wrong rows"
                continue
            part = slice(*(rows // self._group.size * (self._group.rank + i) for i in (0, 1)))
            total = torch.zeros(rows // self._group.size, HIDDEN, device=self._device)
            for rank in ranks:
                drawn = self._draw(what, rows, rank, seed=seed)
                total += sum_of(drawn, part) if what == "combine" else drawn[part].float()
            worst = max(worst, float((actual.float() - total).abs().max() / total.abs().max()))
        assert worst < 0.02, f"{what} is off by {worst}"
        return self._max(worst)

    def _start(
        self,
        start: Callable[[Any], Pending[torch.Tensor]],
        what: str,
        rows: int,
        seed: int,
    ) -> Pending[torch.Tensor]:
        return start(self._draw(what, rows, self._group.rank, seed=seed))

    def _slowest(self, call: Callable[[], object], repeats: int = 5, calls: int = 4) -> float:
        """Return the slowest rank's median seconds of a call, several calls back to back."""
        for _ in range(2):
            call()

        def meet() -> None:
            torch.cuda.synchronize()
            self._group.barrier()

        def several() -> None:
            for _ in range(calls):
                call()

        seconds = median_seconds(several, repeats, warm_up=0, before=meet)
        return self._max(seconds / calls)

    def _max(self, value: float) -> float:
        return float(self._group.all_gather(torch.tensor([value], dtype=torch.float64)).max())


def _starter(
    what: str, collectives: RankGroup, kernels: Kernels
) -> Callable[[Any], Pending[torch.Tensor]]:
    if what == "combine":
        return lambda pairs: start_combine(kernels, collectives, pairs)
    if what == "reduce-scatter":
        return collectives.start_reduce_scatter
    if collectives.gathers is None:
        return collectives.start_all_gather
    gathers = collectives.gathers

    def start(rows: torch.Tensor) -> Pending[torch.Tensor]:
        # Back to back the ranks keep step by the gathers themselves, and nobody reads the rows.
        gathers.met()
        assert gathers.takes(rows)
        return gathers.start(rows)

    return start


def _make_gemm(kernels: Kernels) -> Callable[[], object]:
    """An FP8 product where its kernels are installed, else one in bfloat16."""
    rows, columns, depth = GEMM
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    weight = torch.randn(columns, depth, device="cuda") / depth**0.5
    if not fp8_of(kernels).is_quantized:
        narrow = weight.bfloat16()
        return lambda: torch.nn.functional.linear(x, narrow)
    rows_TK, stored = quantize(kernels, x), StoredWeight(*quantize_block(weight))
    return lambda: fp8_of(kernels).linear(rows_TK, stored)


def nccl_variants(group: RankGroup) -> Iterator[tuple[str, RankGroup]]:
    """Yield NCCL groups: as it is, limited to few blocks, and by its policies."""
    yield "nccl", group
    settings: list[tuple[str, dict[str, int]]] = [
        (f"nccl max_ctas={count}", {"min_ctas": 1, "max_ctas": count}) for count in (4, 8, 16)
    ]
    settings += [("nccl cta_policy=1", {"cta_policy": 1}), ("nccl high priority", {})]
    for name, fields in settings:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=not fields)
        if not all(hasattr(options.config, field) for field in fields):
            continue
        for field, value in fields.items():
            setattr(options.config, field, value)
        made = dist.new_group(backend="nccl", pg_options=options)
        yield name, RankGroup(rank=group.rank, size=group.size, _group=made)
        dist.destroy_process_group(made)


def nvlink_group(group: RankGroup, megabytes: int) -> tuple[RankGroup, Callable[[], None]]:
    """Return the ranks with stores for up to so many megabytes, and what closes those."""
    max_rows = -(-megabytes * MEGABYTE // (2 * HIDDEN * group.size))
    sums = ReduceShape(num_ranks=group.size, max_rows=max_rows, hidden_size=HIDDEN)
    gathers = GatherShape(num_ranks=group.size, max_rows=max_rows, row_bytes=2 * HIDDEN)
    opened = open_nvlink_exchange(group, sums, gathers)

    def close() -> None:
        for one in opened:
            one.close()

    return group.exchanging_by(*opened), close


def show(result: Result) -> None:
    """Print one line."""
    slower = result.both_us / result.gemm_us - 1
    print(
        f"{result.what:14} {result.variant:26} {result.megabytes:5.0f} MB {result.us:9.1f} us"
        f" {result.gb_per_s:7.1f} GB/s  error {result.worst_error:.1e}"
        f"  with GEMM {result.gemm_us:8.1f} -> {result.both_us:8.1f} us"
        f" ({slower:+.1%}, {result.exposed_us:.1f} us exposed)",
        flush=True,
    )


def measure(
    group: RankGroup, device: torch.device, sizes: list[int], only: list[str]
) -> list[Result]:
    """Measure all variants at all sizes."""
    bench, results = Bench(group, device), []

    def measure_one(variant: str, collectives: RankGroup) -> None:
        for what in ("all-gather", "reduce-scatter", "combine"):
            for megabytes in sizes:
                result = bench.run(what, variant, collectives, megabytes)
                results.append(result)
                if group.rank == 0:
                    show(result)

    def is_wanted(name: str) -> bool:
        return not only or name in only

    for name, nccl in nccl_variants(group):
        if is_wanted(name):
            measure_one(name, nccl)
    if is_wanted("nvlink"):
        by_stores, close = nvlink_group(group, max(sizes))
        measure_one("nvlink", by_stores)
        close()
    return results


def main() -> None:
    """Measure everything on every rank; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--sizes", default="1,4,16,64,128,256", help="MB, a comma list")
    parser.add_argument("--only", default="", help="variants, a comma list; empty: all")
    options = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    use_jit_cache()
    groups = init_process_groups(
        ParallelDims(tp=size, rank=rank),
        rendezvous_of(os.environ),
        backend="cpu:gloo,cuda:nccl",
    )
    with torch.inference_mode():
        results = measure(
            groups.tp_group,
            device,
            [int(part) for part in options.sizes.split(",")],
            [part for part in options.only.split(",") if part],
        )
    if rank == 0 and options.json:
        report: dict[str, Any] = {
            "machine": {
                "gpu": torch.cuda.get_device_name(),
                "gpus": size,
                "torch": torch.__version__,
                "nccl": torch.cuda.nccl.version(),  # type: ignore[no-untyped-call]
            },
            "gemm": GEMM,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    groups.destroy()


if __name__ == "__main__":
    main()
