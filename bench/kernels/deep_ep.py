"""DeepEP and our own exchange between the GPUs of one host: right with fresh inputs, and how fast.

Run ``python -m torch.distributed.run --nproc-per-node N -m bench.kernels.deep_ep --json OUT.json``
on a host with N GPUs (``--check`` only compares with a reference). Tokens choose 8 of 256 experts
(``--experts``), of 4 of 8 groups of them (``--topk-groups``), evenly. Low-latency and nvlink: 128
tokens a rank (``--tokens``, one or more numbers), a dispatch and a combine alone and both in one
CUDA graph, in microseconds; each includes the receiving; nvlink is given rows in FP8. Normal: 4096
tokens a rank, FP8 out and bfloat16 home; "GB/s" is what a rank receives over the time of the
slowest rank, "NVLink GB/s" without what it sends to itself. "with places" is the dispatcher whole:
counts, rows of experts, and sums per token included.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from bench.engine.machine import describe_machine
from bench.kernels.expert_rank import NUM_GROUPS, TOP_K, Bench, capture
from bench.kernels.fp8 import quantize
from bench.torchrun import rendezvous_of
from engine.parallel.deep_ep import open_low_latency_buffer, open_normal_buffer
from engine.parallel.deep_ep_buffers import NormalBuffer
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.open import open_nvlink_buffer
from engine.parallel.nvlink.shape import NvlinkShape

PAIRS_PER_GRAPH = 8


def measure_low_latency(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the low-latency mode, and the gathered fallback beside it."""
    return [one for count in options.tokens for one in _low_latency(bench, options, count)]


def _low_latency(bench: Bench, options: argparse.Namespace, tokens: int) -> list[dict[str, Any]]:
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
        results.append(time_masked(bench, name, dispatcher, tokens))
        results.append(time_in_graph(bench, "gathered", gathered, tokens))
    torch.cuda.synchronize()
    buffer.close()
    return results


def measure_nvlink(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time our own exchange."""
    results = []
    for tokens in options.tokens:
        shape = NvlinkShape(
            num_ranks=bench.group.size,
            num_experts=bench.num_experts,
            max_tokens_per_rank=tokens,
            hidden_size=bench.hidden_size,
            top_k=TOP_K,
        )
        buffer = open_nvlink_buffer(bench.group, shape)
        dispatcher = NvlinkDispatcher(buffer)
        name = f"nvlink, {bench.group.size} ranks, {bench.num_experts} experts"
        results.append(bench.check(name, dispatcher, tokens, steps=6))
        results.append(check_in_graph(bench, name, dispatcher, tokens))
        if not options.check:
            results.append(time_masked(bench, name, dispatcher, tokens))
        buffer.close()
    return results


def check_in_graph(bench: Bench, name: str, dispatcher: Any, num_tokens: int) -> dict[str, Any]:
    """Capture dispatch, experts and combine once, and replay with fresh inputs.

    Of the tokens a rank has all, some or none: the rest is padding, which goes nowhere.
    """
    static = bench.draw(num_tokens)

    def step() -> torch.Tensor:
        hidden = bench.feed(dispatcher, static.hidden)
        rows, handle = dispatcher.start_dispatch(hidden, static.ids, static.weights).wait()
        out: torch.Tensor = dispatcher.start_combine(bench.run_experts(rows), handle, None).wait()
        return out

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    worst = 0.0
    for turn in range(4):
        few = (turn + bench.group.rank) % 3
        fresh = bench.draw_padded(num_tokens, (num_tokens, num_tokens // 3, 0)[few])
        static.hidden.copy_(fresh.hidden)
        static.ids.copy_(fresh.ids)
        static.weights.copy_(fresh.weights)
        graph.replay()
        worst = max(worst, bench.error(out, fresh))
    torch.cuda.synchronize()
    return bench.verdict(f"{name}, in a CUDA graph, checked", worst)


def time_masked(bench: Bench, name: str, dispatcher: Any, num_tokens: int) -> dict[str, Any]:
    """Time a dispatch, a combine, and both in one graph, with rows as the dispatcher takes them."""
    tokens = bench.draw(num_tokens)
    hidden = bench.feed(dispatcher, tokens.hidden)

    def dispatch() -> Any:
        return dispatcher.start_dispatch(hidden, tokens.ids, tokens.weights).wait()

    rows, handle = dispatch()
    out = torch.zeros(rows.data_LMD.shape, dtype=torch.bfloat16, device="cuda")

    def combine() -> None:
        dispatcher.start_combine(out, handle, None).wait()

    def both() -> None:
        nonlocal handle
        _, handle = dispatch()
        combine()

    graph = capture(both, PAIRS_PER_GRAPH)
    dispatch_s, combine_s = (
        bench.slowest(capture(call, PAIRS_PER_GRAPH).replay) / PAIRS_PER_GRAPH
        for call in (dispatch, combine)
    )
    both_s = bench.slowest(graph.replay) / PAIRS_PER_GRAPH
    return {
        "what": f"{name}, {num_tokens} tokens",
        "dispatch_us": dispatch_s * 1e6,
        "combine_us": combine_s * 1e6,
        "both_in_graph_us": both_s * 1e6,
        "both_eager_us": bench.slowest(both) * 1e6,
    }


def time_in_graph(bench: Bench, name: str, dispatcher: Any, num_tokens: int) -> dict[str, Any]:
    """Time dispatch and combine of a masked dispatcher in a graph, without experts."""
    tokens = bench.draw(num_tokens)

    def dispatch() -> Any:
        hidden = bench.feed(dispatcher, tokens.hidden)
        return dispatcher.start_dispatch(hidden, tokens.ids, tokens.weights).wait()

    rows, _ = dispatch()
    out = torch.zeros(rows.data_LMD.shape, dtype=torch.bfloat16, device="cuda")

    def both() -> None:
        _, handle = dispatch()
        dispatcher.start_combine(out, handle, None).wait()

    graph = capture(both, PAIRS_PER_GRAPH)
    seconds = bench.slowest(graph.replay) / PAIRS_PER_GRAPH
    return {"what": f"{name}, {num_tokens} tokens", "both_in_graph_us": seconds * 1e6}


def measure_normal(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time the normal mode for each number of SMs."""
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
    rows = quantize(bench.kernels, tokens.hidden)
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
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[128], help="of a rank, low-latency and nvlink"
    )
    parser.add_argument("--topk-groups", type=int, default=4, help=f"of {NUM_GROUPS}, for a token")
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
        rendezvous_of(os.environ),
        backend="cpu:gloo,cuda:nccl",
    )
    results: list[dict[str, Any]] = []
    measures = {
        "low-latency": measure_low_latency,
        "nvlink": measure_nvlink,
        "normal": measure_normal,
    }
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
