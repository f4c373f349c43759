"""Decode on one GPU: an MoE layer of an EP8 rank in a graph, its kernels, attention, sampling.

Run ``python -m benchmarks.decode_layer --json OUT.json`` on a Hopper GPU with the `gpu` extra. The
layer has the shapes of DeepSeek-V3 (671B) with 128 heads and 32 of the 256 experts; tokens go to
experts of this GPU only, as many as all ranks would send (no traffic). A layer's time is the
difference between models of three and of one, both replayed from a CUDA graph; times are medians
of device events, after warm-up. Weights and latents are invented.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch import ForwardBatch, pack_forward_batch
from engine.build import LoadFormat, build_kv_pool, build_model
from engine.execution import Execution
from engine.graphs.capture import Capture
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.latent_storage import to_storage
from engine.memory.kv_pool import KVPool
from engine.parallel.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.shapes import DEEPSEEK_V3, expert_shard

NUM_RANKS = 8
BLOCK_SIZE = 64
DEVICE = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SAMPLING: dict[str, dict[str, float]] = {
    "temperature 1": {},
    "temperature 0.6, top_p 0.95": {"temperature": 0.6, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "all": {"temperature": 0.6, "top_p": 0.95, "top_k": 50, "presence": 0.5, "repetition": 1.1},
}


def measure(work: Callable[[], object], repeats: int = 30) -> tuple[float, torch.cuda.CUDAGraph]:
    """Capture `work`; return the median microseconds of a replay, and the graph."""
    graph = Capture(DEVICE).graph(lambda: void(work()))
    times = []
    for _ in range(repeats):
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) * 1e3)
    return statistics.median(times), graph


def void(_: object) -> None:
    """Forget a result: graphs return nothing."""


def kernel_times(graph: torch.cuda.CUDAGraph, repeats: int, num_layers: int) -> dict[str, float]:
    """Return the microseconds per layer of each kernel of a graph, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            graph.replay()
        torch.cuda.synchronize()
    rows = [
        (event.key, event.self_device_time_total / repeats / num_layers)
        for event in profiler.key_averages()
    ]
    return {name[:120]: round(us, 2) for name, us in sorted(rows, key=lambda row: -row[1]) if us}


def make_batch(num_seqs: int, context: int) -> ForwardBatch:
    """Return a step of `num_seqs` tokens, each the last of `context`; blocks are shuffled."""
    per_seq = -(-context // BLOCK_SIZE)
    generator = np.random.default_rng(0)
    tables = (generator.permutation(num_seqs * per_seq) + 1).astype(np.int32)
    return pack_forward_batch(
        generator.integers(0, 1024, num_seqs),
        np.ones(num_seqs, dtype=np.int64),
        np.full(num_seqs, context, dtype=np.int64),
        tables.reshape(num_seqs, per_seq),
        logits_indices=np.arange(num_seqs),
        block_size=BLOCK_SIZE,
        device=DEVICE,
    )


def fill(pool: KVPool) -> None:
    """Write invented latents into every block."""
    for block in pool.data:
        block.copy_(to_storage(torch.randn(block.shape, device=DEVICE), pool.dtype))


def measure_layer(
    kernels: Kernels, num_seqs: int, context: int, kv_dtype: torch.dtype
) -> dict[str, Any]:
    """Time an MoE layer, and list its kernels."""
    times = {}
    kernels_us: dict[str, float] = {}
    for num_layers in (1, 3):
        config = replace(
            expert_shard(DEEPSEEK_V3, ranks=1, of=NUM_RANKS),
            num_hidden_layers=num_layers,
            first_k_dense_replace=0,
        )
        dispatcher = LoopbackMaskedDispatcher(kernels, config.n_routed_experts, NUM_RANKS)
        model = build_model(
            config,
            dtype=torch.bfloat16,
            device=DEVICE,
            load_format=LoadFormat.DUMMY,
            kernels=kernels,
            execution=Execution(dispatcher=dispatcher),
        )
        model.prepare_absorption()
        num_blocks = 1 + num_seqs * -(-context // BLOCK_SIZE)
        pool = build_kv_pool(model, num_blocks, dtype=kv_dtype)
        fill(pool)
        batch = make_batch(num_seqs, context)

        def run(model: Any = model, batch: Any = batch, pool: Any = pool) -> object:
            return model.forward(batch, pool)

        times[num_layers], graph = measure(run)
        kernels_us = kernel_times(graph, 5, num_layers)
    return {
        "what": f"MoE layer, {num_seqs} x {context}, {kv_dtype}",
        "us": (times[3] - times[1]) / 2,
        "us_of_one_with_embedding_and_norm": times[1],
        "kernels_us_per_layer": kernels_us,
    }


def measure_attention(
    kernels: Kernels, num_seqs: int, context: int, kv_dtype: torch.dtype
) -> dict[str, Any]:
    """Time paged attention of one layer of three, schedule apart."""
    batch, heads, latent, rank = make_batch(num_seqs, context), 128, 576, 512
    num_blocks = 1 + batch.block_tables.numel()
    pool = KVPool(num_blocks, 3, BLOCK_SIZE, latent, dtype=kv_dtype, device=DEVICE)
    fill(pool)
    cache = pool.layer(1)
    q_SHL = torch.randn(num_seqs, heads, latent, device=DEVICE).bfloat16()
    queries = kernels.plan_paged(batch.block_tables, batch.seq_lens, cache, heads)
    us, _ = measure(lambda: kernels.paged_attention(q_SHL, cache, queries, rank, 0.1352338))
    plan_us, _ = measure(
        lambda: kernels.plan_paged(batch.block_tables, batch.seq_lens, cache, heads)
    )
    operations = 2e-12 * num_seqs * context * heads * (latent + rank)
    return {
        "what": f"paged attention, {num_seqs} x {context}, {kv_dtype}",
        "us": us,
        "tflops": operations / us * 1e6,
        "schedule_us": plan_us,
    }


def measure_sampling(num_rows: int, sharpness: float) -> dict[str, Any]:
    """Time the choice of tokens with various parameters, as microseconds by name."""
    vocab = DEEPSEEK_V3.vocab_size
    sampler = GraphSampler(vocab, num_rows, DEVICE)
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * sharpness).bfloat16().float()
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)

    def floats(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, device=DEVICE)

    def rows(changes: dict[str, float]) -> SamplingRows:
        return SamplingRows(
            slot=torch.arange(num_rows, device=DEVICE),
            output_index=zeros,
            mixed_seed=torch.arange(num_rows, device=DEVICE) * 0x9E3779B97F4A7C1,
            top_k=zeros + int(changes.get("top_k", vocab)),
            temperature=floats(changes.get("temperature", 1.0)),
            top_p=floats(changes.get("top_p", 1.0)),
            min_p=floats(0.0),
            repetition=floats(changes.get("repetition", 1.0)),
            frequency=floats(0.0),
            presence=floats(changes.get("presence", 0.0)),
        )

    result: dict[str, Any] = {"what": f"sampling [{num_rows}, {vocab}], sharpness {sharpness:g}"}
    greedy = rows({})
    result["greedy"], _ = measure(lambda: sampler.choose(logits, greedy, SamplingStage.GREEDY))
    for name, changes in SAMPLING.items():
        chosen = rows(changes)

        def choose(chosen: SamplingRows = chosen) -> torch.Tensor:
            return sampler.choose(logits, chosen, SamplingStage.FULL)

        result[name], _ = measure(choose)
    return result


@torch.inference_mode()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kernels = create_kernels(DEVICE)
    results: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name()}]
    shapes = ((arguments.batch, arguments.context), (2 * arguments.batch, arguments.context // 2))
    for dtype in DTYPES.values():
        results += [measure_attention(kernels, *shape, dtype) for shape in shapes]
    results += [measure_sampling(2 * arguments.batch, sharpness) for sharpness in (0.5, 4.0)]
    for dtype in DTYPES.values():
        results.append(measure_layer(kernels, *shapes[0], dtype))
    for result in results:
        print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
