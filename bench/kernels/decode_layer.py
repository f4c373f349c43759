"""Decode on one GPU: an MoE layer of an EP8 rank in a graph, its kernels, attention, sampling.

Run ``python -m bench.kernels.decode_layer --json OUT.json`` on a Hopper GPU with the `gpu` extra.
The layer has the shapes of DeepSeek-V3 (671B) with 128 heads and 32 of the 256 experts; tokens go
to experts of this GPU only, as many as all ranks would send (no traffic). A layer's time is the
difference between models of three and of one, both replayed from a CUDA graph; times are medians of
device events, after warm-up. Weights and latents are invented. With ``--sampling-only`` just the
choice of tokens is timed, and compared with the sampler that captures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from bench.kernels.device_time import median_seconds
from bench.shapes import DEEPSEEK_V3, expert_shard
from engine.attention.kv_spec import KVSpec
from engine.attention.latent_storage import to_storage
from engine.attention.paged_queries import PagedQueries
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.execution import Execution
from engine.graphs.capture import Capture
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.memory.kv_pool import KVPool
from engine.sampling.graph_sampler import GraphSampler, SamplingRows, SamplingStage
from engine.sampling.inputs import SamplingInput
from engine.sampling.noise import mix_seed
from engine.sampling.sampler import Sampler
from engine.streams import Streams
from runtime.sampling import SamplingParams

NUM_RANKS = 8
BLOCK_SIZE = 64
DEVICE = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "temperature 0.6, top_p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "top_p 0.5": SamplingParams(top_p=0.5),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 50": SamplingParams(top_k=50),
    "all": SamplingParams(
        temperature=0.6, top_p=0.95, top_k=50, presence_penalty=0.5, repetition_penalty=1.1
    ),
}
NUM_PROMPT_TOKENS = 1024
"""That penalties see."""


def measure(work: Callable[[], object], repeats: int = 30) -> tuple[float, torch.cuda.CUDAGraph]:
    """Capture `work`; return the median microseconds of a replay, and the graph."""
    graph = Capture(Streams(DEVICE)).graph(lambda: void(work()))
    return median_seconds(graph.replay, repeats, warm_up=0) * 1e6, graph


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
    kernels: Kernels, num_seqs: int, context: int, kv_dtype: torch.dtype, *, dependent: bool = True
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
            execution=Execution(dispatcher=dispatcher, dependent_launches=dependent),
        )
        model.prepare()
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
    pool = KVPool(num_blocks, 3, BLOCK_SIZE, KVSpec.shared(latent), dtype=kv_dtype, device=DEVICE)
    fill(pool)
    cache = pool.layer(1)
    q_SHL = torch.randn(num_seqs, heads, latent, device=DEVICE).bfloat16()
    single = PagedQueries(block_tables_SB=batch.block_tables, seq_lens_S=batch.seq_lens)
    queries = kernels.attention.plan_paged(single, cache, heads)
    us, _ = measure(
        lambda: kernels.attention.paged_attention(q_SHL, cache, queries, rank, 0.1352338)
    )
    plan_us, _ = measure(lambda: kernels.attention.plan_paged(single, cache, heads))
    operations = 2e-12 * num_seqs * context * heads * (latent + rank)
    return {
        "what": f"paged attention, {num_seqs} x {context}, {kv_dtype}",
        "us": us,
        "tflops": operations / us * 1e6,
        "schedule_us": plan_us,
    }


def sampling_rows(params: SamplingParams, num_rows: int) -> SamplingRows:
    """Return what a step of first tokens with these params asks for; seeds are the rows."""

    def floats(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, device=DEVICE)

    zeros = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    return SamplingRows(
        slot=torch.arange(num_rows, device=DEVICE),
        output_index=zeros,
        mixed_seed=torch.tensor([mix_seed(row) for row in range(num_rows)], device=DEVICE),
        top_k=zeros + (params.top_k or DEEPSEEK_V3.vocab_size),
        temperature=floats(params.temperature),
        top_p=floats(params.top_p),
        min_p=floats(params.min_p),
        repetition=floats(params.repetition_penalty),
        frequency=floats(params.frequency_penalty),
        presence=floats(params.presence_penalty),
    )


def measure_sampling(num_rows: int, sharpness: float) -> dict[str, Any]:
    """Time the choice of tokens with various params, and count tokens that `Sampler` differs in."""
    vocab = DEEPSEEK_V3.vocab_size
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * sharpness).bfloat16().float()
    prompts = np.random.default_rng(0).integers(0, vocab, (num_rows, NUM_PROMPT_TOKENS)).tolist()
    sampler = GraphSampler(vocab, num_rows, DEVICE)
    us, num_differences = {}, {}
    for name, params in SAMPLING.items():
        for row, prompt in enumerate(prompts):
            sampler.assign(row, params, prompt, [])
        rows, stage = sampling_rows(params, num_rows), SamplingStage.of(params)
        chosen = sampler.choose(logits.clone(), rows, stage).tolist()
        inputs = [
            SamplingInput(replace(params, seed=row), prompt, [])
            for row, prompt in enumerate(prompts)
        ]
        expected = [token.token_id for token in Sampler(vocab).sample(logits, inputs)]
        pairs = zip(chosen, expected, strict=True)
        num_differences[name] = sum(ours != theirs for ours, theirs in pairs)
        # Replays penalise the same logits again and again: the times stay the same.
        work = partial(sampler.choose, logits.clone(), rows, stage)
        us[name], _ = measure(work)
    what = f"sampling [{num_rows}, {vocab}], sharpness {sharpness:g}"
    return {"what": what, "us": us, "num_differences": num_differences}


def measure_layers(
    batch: int, context: int, dtype: str, *, dependent: bool
) -> list[dict[str, Any]]:
    """Time a layer alone."""
    kernels = create_kernels(DEVICE)
    layer = measure_layer(kernels, batch, context, DTYPES[dtype], dependent=dependent)
    return [{"dependent_launches": dependent}, layer]


def measure_all(batch: int, context: int) -> list[dict[str, Any]]:
    """Time attention, sampling and layers."""
    kernels = create_kernels(DEVICE)
    shapes = ((batch, context), (2 * batch, context // 2))
    results = []
    for dtype in DTYPES.values():
        results += [measure_attention(kernels, *shape, dtype) for shape in shapes]
    results += [measure_sampling(2 * batch, sharpness) for sharpness in (0.5, 4.0)]
    for dtype in DTYPES.values():
        results.append(measure_layer(kernels, *shapes[0], dtype))
    return results


@torch.inference_mode()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--sampling-only", action="store_true", help="no attention, no layer")
    parser.add_argument("--layer-only", action="store_true", help="no attention, no sampling")
    parser.add_argument("--kv", choices=DTYPES, default="bf16", help="with --layer-only")
    parser.add_argument(
        "--dependent-launches",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --layer-only",
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name()}]
    if arguments.sampling_only:
        for num_rows in (arguments.batch, 2 * arguments.batch):
            results += [measure_sampling(num_rows, sharpness) for sharpness in (0.5, 4.0)]
    elif arguments.layer_only:
        results += measure_layers(
            arguments.batch,
            arguments.context,
            arguments.kv,
            dependent=arguments.dependent_launches,
        )
    else:
        results += measure_all(arguments.batch, arguments.context)
    for result in results:
        print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
