"""DeepEP between the GPUs of one host: right with fresh inputs, and how fast, in both modes.

Run ``python -m torch.distributed.run --nproc-per-node N -m benchmarks.deep_ep --json OUT.json`` on
a host with N GPUs (``--check`` only compares with a reference). Tokens choose 8 of 256 experts
(``--experts``) evenly. Low-latency: 128 tokens a rank, a dispatch and a combine alone and both in
one CUDA graph, in microseconds; each includes the receiving. Normal: 4096 tokens a rank, FP8 out
and bfloat16 home; "GB/s" is what a rank receives over the time of the slowest rank, "NVLink GB/s"
without what it sends to itself. "with places" is the dispatcher whole: counts, rows of experts, and
sums per token included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deploy.engine_bench.machine import describe_machine
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.reference import quantize_rows
from engine.parallel.deep_ep import open_low_latency_buffer, open_normal_buffer
from engine.parallel.deep_ep_buffers import LowLatencyBuffer, Masked, NormalBuffer
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup, init_process_groups
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.token_dispatcher import AlignedRows

TOP_K = 8
PAIRS_PER_GRAPH = 8
WORST_ERROR = 0.05
"""Of a result, relative: e4m3 on the way out, bfloat16 per expert, per rank and at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What a rank brings: [T, D] bfloat16, [T, K] int64 experts, [T, K] float32 weights."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Bench:
    """One rank's measurements."""

    def __init__(self, group: RankGroup, options: argparse.Namespace) -> None:
        self.group = group
        self.kernels: Kernels = create_kernels("cuda")
        self.num_experts: int = options.experts
        self.hidden_size: int = options.hidden
        self.share = self.num_experts // group.size
        self._seed = 0

    def draw(self, num_tokens: int) -> Tokens:
        """Return fresh tokens; every call differs."""
        self._seed += 1
        generator = torch.Generator("cuda").manual_seed(10_000 * self._seed + self.group.rank)
        shape = (num_tokens, self.hidden_size)
        hidden = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        scores = torch.rand(num_tokens, self.num_experts, device="cuda", generator=generator)
        weights, ids = scores.topk(TOP_K, dim=-1)
        return Tokens(hidden=hidden, ids=ids, weights=weights)

    def factor(self, experts: torch.Tensor) -> torch.Tensor:
        """Return what stands for an expert's product: a factor of its own."""
        return 1.0 + (experts * 37 % 256) / 256.0

    def run_experts(self, rows: AlignedRows | MaskedRows) -> torch.Tensor:
        """Multiply every row in use by its expert's factor."""
        first = self.group.rank * self.share
        factors = self.factor(torch.arange(first, first + self.share, device="cuda"))
        if isinstance(rows, AlignedRows):
            scaled = rows.rows.dequantize() * factors[rows.expert_M.clamp_min(0).long()][:, None]
            return scaled.bfloat16()
        out = torch.empty(rows.data_LMD.shape, dtype=torch.bfloat16, device="cuda")
        for expert in range(self.share):
            groups = rows.data_LMD[expert].float().view(-1, self.hidden_size // 128, 128)
            scaled = groups * rows.scale_LMG[expert].unsqueeze(-1) * factors[expert]
            out[expert] = scaled.flatten(1)
        return out

    def error(self, out: torch.Tensor, tokens: Tokens) -> float:
        """Return the difference from the plain sum over experts, relative, by norms.

        A kernel may round a number to e4m3 the other way than the reference, an eighth of it away,
        so the largest difference of one number says nothing.
        """
        rows = quantize_rows(tokens.hidden).dequantize()
        expected = rows * (self.factor(tokens.ids) * tokens.weights).sum(1, keepdim=True)
        if not out.numel():
            return 0.0
        worst = (out.float() - expected).norm() / expected.norm()
        # A comparison with NaN is false: it must not look like a small error.
        return float(worst) if bool(torch.isfinite(worst)) else float("inf")

    def slowest(self, call: Callable[[], object], repeats: int = 20, warm_up: int = 5) -> float:
        """Return the median seconds of a call on the device, of the slowest rank."""
        for _ in range(warm_up):
            call()
        times = []
        for _ in range(repeats):
            self.group.barrier()
            torch.cuda.synchronize()
            # Some work first, so that the host runs ahead, and ranks begin together.
            torch.cuda._sleep(200_000)  # type: ignore[no-untyped-call]
            first, last = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(float(first.elapsed_time(last)) / 1e3)
        mine = torch.tensor([statistics.median(times)], dtype=torch.float64, device="cuda")
        return float(self.group.all_gather(mine).max())

    def check(self, name: str, dispatcher: Any, num_tokens: int, steps: int = 3) -> dict[str, Any]:
        """Compare with the reference: full, uneven and empty batches, fresh every time."""
        worst = 0.0
        for step in range(steps):
            count = (num_tokens, num_tokens // (self.group.rank + 1), 0)[step % 3]
            if step % 3 == 2 and self.group.rank == 0:
                count = 1
            tokens = self.draw(count)
            pending = dispatcher.start_dispatch(tokens.hidden, tokens.ids, tokens.weights)
            rows, handle = pending.wait()
            out = dispatcher.start_combine(self.run_experts(rows), handle, None).wait()
            worst = max(worst, self.error(out, tokens))
        return self.verdict(f"{name}, {num_tokens} tokens, checked", worst)

    def verdict(self, what: str, worst: float) -> dict[str, Any]:
        """Return a check's result; all ranks get that of the worst."""
        mine = torch.tensor([worst], dtype=torch.float64, device="cuda")
        worst = float(self.group.all_gather(mine).max())
        return {"what": what, "worst_error": worst, "ok": worst < WORST_ERROR}


def measure_low_latency(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the low-latency mode, and the gathered fallback beside it."""
    tokens = options.tokens
    shape = LowLatencyShape(
        num_ranks=bench.group.size,
        num_experts=bench.num_experts,
        max_tokens_per_rank=tokens,
        hidden_size=bench.hidden_size,
    )
    buffer = open_low_latency_buffer(bench.group, shape, top_k=TOP_K)
    dispatcher = DeepEPLowLatencyDispatcher(buffer)
    gathered = MaskedGatheredDispatcher(
        bench.kernels, bench.share, bench.group, max_tokens_per_rank=tokens
    )
    name = f"low-latency, {bench.group.size} ranks, {bench.num_experts} experts"
    results = [
        bench.check(name, dispatcher, tokens),
        bench.check(f"gathered, {bench.group.size} ranks", gathered, tokens),
        check_in_graph(bench, name, dispatcher, tokens),
        check_in_graph(bench, f"gathered, {bench.group.size} ranks", gathered, tokens),
    ]
    if not options.check:
        results += time_low_latency(bench, buffer, name, tokens)
        results.append(time_in_graph(bench, "gathered", gathered, tokens))
    torch.cuda.synchronize()
    buffer.close()
    return results


def check_in_graph(bench: Bench, name: str, dispatcher: Any, num_tokens: int) -> dict[str, Any]:
    """Capture dispatch, experts and combine once, and replay with fresh inputs."""
    static = bench.draw(num_tokens)

    def step() -> torch.Tensor:
        rows, handle = dispatcher.start_dispatch(static.hidden, static.ids, static.weights).wait()
        out: torch.Tensor = dispatcher.start_combine(bench.run_experts(rows), handle, None).wait()
        return out

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    worst = 0.0
    for _ in range(4):
        fresh = bench.draw(num_tokens)
        static.hidden.copy_(fresh.hidden)
        static.ids.copy_(fresh.ids)
        static.weights.copy_(fresh.weights)
        graph.replay()
        worst = max(worst, bench.error(out, fresh))
    torch.cuda.synchronize()
    return bench.verdict(f"{name}, in a CUDA graph, checked", worst)


def time_low_latency(
    bench: Bench, buffer: LowLatencyBuffer, name: str, num_tokens: int
) -> list[dict[str, Any]]:
    """Time a dispatch, a combine, and both in one graph."""
    tokens = bench.draw(num_tokens)

    def dispatch() -> Masked:
        return buffer.start_dispatch(tokens.hidden, tokens.ids).wait()

    masked = dispatch()
    out = torch.zeros(masked.data_LMD.shape, dtype=torch.bfloat16, device="cuda")

    def combine() -> torch.Tensor:
        return buffer.start_combine(out, tokens.ids, tokens.weights, masked.handle).wait()

    def both() -> None:
        nonlocal masked
        masked = dispatch()
        combine()

    graph = _capture(both, PAIRS_PER_GRAPH)
    remote = (bench.group.size - 1) / bench.group.size * num_tokens * TOP_K
    out_bytes = remote * (bench.hidden_size + bench.hidden_size // 32)
    home_bytes = remote * 2 * bench.hidden_size
    dispatch_s, combine_s = (
        bench.slowest(_capture(call, PAIRS_PER_GRAPH).replay) / PAIRS_PER_GRAPH
        for call in (dispatch, combine)
    )
    both_s = bench.slowest(graph.replay) / PAIRS_PER_GRAPH
    return [
        {
            "what": f"{name}, {num_tokens} tokens",
            "dispatch_us": dispatch_s * 1e6,
            "combine_us": combine_s * 1e6,
            "dispatch_nvlink_gb_per_s": out_bytes / dispatch_s / 1e9,
            "combine_nvlink_gb_per_s": home_bytes / combine_s / 1e9,
            "both_in_graph_us": both_s * 1e6,
            "both_eager_us": bench.slowest(both) * 1e6,
        }
    ]


def time_in_graph(bench: Bench, name: str, dispatcher: Any, num_tokens: int) -> dict[str, Any]:
    """Time dispatch and combine of a masked dispatcher in a graph, without experts."""
    tokens = bench.draw(num_tokens)
    rows, _ = dispatcher.start_dispatch(tokens.hidden, tokens.ids, tokens.weights).wait()
    out = torch.zeros(rows.data_LMD.shape, dtype=torch.bfloat16, device="cuda")

    def both() -> None:
        _, handle = dispatcher.start_dispatch(tokens.hidden, tokens.ids, tokens.weights).wait()
        dispatcher.start_combine(out, handle, None).wait()

    graph = _capture(both, PAIRS_PER_GRAPH)
    seconds = bench.slowest(graph.replay) / PAIRS_PER_GRAPH
    return {"what": f"{name}, {num_tokens} tokens", "both_in_graph_us": seconds * 1e6}


def measure_normal(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the normal mode for each number of multiprocessors."""
    results = []
    for num_sms in options.sms:
        shape = NormalShape(
            num_ranks=bench.group.size,
            num_experts=bench.num_experts,
            hidden_size=bench.hidden_size,
            num_sms=num_sms,
        )
        buffer = open_normal_buffer(bench.group, shape)
        dispatcher = DeepEPNormalDispatcher(bench.kernels, buffer)
        name = f"normal, {bench.group.size} ranks, {num_sms} SMs"
        results.append(bench.check(name, dispatcher, options.many))
        if not options.check:
            results.append(time_normal(bench, buffer, dispatcher, name, options.many))
        torch.cuda.synchronize()
        buffer.close()
    return results


def time_normal(
    bench: Bench,
    buffer: NormalBuffer,
    dispatcher: DeepEPNormalDispatcher,
    name: str,
    num_tokens: int,
) -> dict[str, Any]:
    """Time a dispatch and a combine alone, and the dispatcher's."""
    tokens = bench.draw(num_tokens)
    rows = bench.kernels.quantize_rows(tokens.hidden)
    arrived = buffer.start_dispatch(rows, tokens.ids, tokens.weights, alignment=128).wait()
    num_rows = arrived.rows.num_rows
    owners = torch.unique(tokens.ids // bench.share + bench.group.size * _column(num_tokens))
    own_rows = int((owners % bench.group.size == bench.group.rank).sum())
    home = torch.zeros((num_rows, bench.hidden_size), dtype=torch.bfloat16, device="cuda")
    seconds = {
        "dispatch": bench.slowest(
            lambda: buffer.start_dispatch(rows, tokens.ids, tokens.weights, alignment=128).wait()
        ),
        "combine": bench.slowest(lambda: buffer.start_combine(home, arrived.handle, None).wait()),
    }
    places, handle = dispatcher.start_dispatch(rows, tokens.ids, tokens.weights).wait()
    out = torch.zeros((places.rows.num_rows, bench.hidden_size), device="cuda").bfloat16()
    row_bytes = {
        "dispatch": bench.hidden_size + bench.hidden_size // 32,
        "combine": 2 * bench.hidden_size,
    }
    result: dict[str, Any] = {"what": f"{name}, {num_tokens} tokens", "rows_received": num_rows}
    for way, time in seconds.items():
        result[f"{way}_us"] = time * 1e6
        result[f"{way}_gb_per_s"] = num_rows * row_bytes[way] / time / 1e9
        result[f"{way}_nvlink_gb_per_s"] = (num_rows - own_rows) * row_bytes[way] / time / 1e9
    result["dispatch_with_places_us"] = 1e6 * bench.slowest(
        lambda: dispatcher.start_dispatch(rows, tokens.ids, tokens.weights).wait()
    )
    result["combine_with_sums_us"] = 1e6 * bench.slowest(
        lambda: dispatcher.start_combine(out, handle, None).wait()
    )
    return result


def _column(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens, device="cuda").unsqueeze(1)


def _capture(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `times` calls, warmed up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return graph


def show(results: list[dict[str, Any]]) -> None:
    """Print one line a result."""
    for result in results:
        numbers = ((k, v) for k, v in result.items() if k != "what")
        text = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in numbers)
        print(f"{result['what']}: {text}", flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--check", action="store_true", help="compare only, do not time")
    parser.add_argument("--modes", nargs="+", default=["low-latency", "normal"])
    parser.add_argument("--experts", type=int, default=256, help="physical, of all ranks")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--tokens", type=int, default=128, help="of a rank, low-latency")
    parser.add_argument("--many", type=int, default=4096, help="tokens of a rank, normal")
    parser.add_argument("--sms", type=int, nargs="+", default=[20], help="of the normal mode")
    return parser.parse_args()


def main() -> int:
    """Measure on every rank; rank 0 reports. Returns 1 if a check failed."""
    options = parse()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    groups: ProcessGroups = init_process_groups(
        ParallelDims(dp=size, ep=size, rank=rank),
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        backend="cpu:gloo,cuda:nccl",
    )
    results: list[dict[str, Any]] = []
    measures = {"low-latency": measure_low_latency, "normal": measure_normal}
    with torch.inference_mode():
        bench = Bench(groups.ep_group, options)
        for mode in options.modes:
            found = measures[mode](bench, options)
            results += found
            if rank == 0:
                show(found)
    if rank == 0 and options.json:
        report = {"machine": describe_machine("cuda", size), "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    groups.destroy()
    return 0 if all(result.get("ok", True) for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
