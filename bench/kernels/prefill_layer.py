"""Prefill on one GPU: the large kernels alone, an MoE and a dense layer by stage, filling a rank.

Run ``python -m bench.kernels.prefill_layer --json OUT.json [--fill]`` on a Hopper GPU with the
`gpu` extra. Shapes are those of DeepSeek-V3 (671B), all heads and experts on the one GPU; weights
are invented and routing is balanced in the mean. Times are medians of device events, after warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.kernels.device_time import median_seconds
from bench.kernels.fp8 import fp8_of, quantize
from bench.shapes import DEEPSEEK_V3
from bench.stage_timer import StageTimer, TimerMode, attention_operations
from engine.attention.kernels import VarlenLengths
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool
from engine.execution import Execution
from engine.formats.expert_rows import AlignedRows
from engine.formats.stored_weight import StoredWeight
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.layers.norm import Residual
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.operations import run
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.pending import Pending, Ready
from engine.weights.dummy import fill_with_dummy_weights
from engine.weights.fp8 import quantize_block
from experts.data_sheets import find_sheet

PROMPTS = 4
PROMPT_LEN = 4096
BLOCK_SIZE = 64


def random_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a block-quantised random matrix."""
    return quantize_block(torch.randn(rows, columns, device="cuda") / columns**0.5)


def measure_dense(kernels: Kernels) -> list[dict[str, Any]]:
    """Time the dense FP8 products of a layer at 4096 and 16384 rows."""
    fp8, results = fp8_of(kernels), []
    for name, rows, columns in (
        ("o_proj", 7168, 16384),
        ("q_b_proj", 24576, 1536),
        ("kv_b_proj", 32768, 512),
        ("qkv_a_proj", 2112, 7168),
    ):
        weight = random_weight(rows, columns)
        for num_tokens in (4096, 16384):
            x = quantize(kernels, torch.randn(num_tokens, columns, device="cuda").bfloat16())

            def call(x: Any = x, weight: Any = weight) -> object:
                return fp8.linear(x, StoredWeight(*weight))

            seconds = median_seconds(call)
            results.append(
                {
                    "what": f"fp8 {name} {num_tokens}x{rows}x{columns}",
                    "ms": seconds * 1e3,
                    "tflops": 2e-12 * num_tokens * rows * columns / seconds,
                }
            )
    return results


def measure_experts(kernels: Kernels, num_rows: int = 65536, experts: int = 32) -> dict[str, Any]:
    """Time the pair of grouped products, with the activation between them, over equal groups."""
    width, hidden = DEEPSEEK_V3.moe_intermediate_size, DEEPSEEK_V3.hidden_size
    w13, w2 = (
        tuple(torch.stack([t] * experts) for t in random_weight(n, k))
        for n, k in ((2 * width, hidden), (hidden, width))
    )
    rows = quantize(kernels, torch.randn(num_rows, hidden, device="cuda").bfloat16())
    names = torch.arange(experts, dtype=torch.int32, device="cuda")
    expert_M = names.repeat_interleave(num_rows // experts)
    fp8: Any = fp8_of(kernels)
    gemm = fp8.products.gemm  # the products without the activation
    up = median_seconds(lambda: gemm.grouped_linear(rows, expert_M, *w13))
    narrow = quantize(kernels, torch.randn(num_rows, width, device="cuda").bfloat16())
    down = median_seconds(lambda: gemm.grouped_linear(narrow, expert_M, *w2))
    aligned = AlignedRows(rows=rows, expert_M=expert_M)
    whole = median_seconds(lambda: fp8.grouped_mlp(aligned, StoredWeight(*w13), StoredWeight(*w2)))
    operations = 2e-12 * num_rows * 3 * width * hidden
    return {
        "what": f"grouped pair, {num_rows} rows over {experts} experts",
        "ms": (up + down) * 1e3,
        "tflops": operations / (up + down),
        "up_ms": up * 1e3,
        "down_ms": down * 1e3,
        "with_activation_ms": whole * 1e3,
        "with_activation_tflops": operations / whole,
    }


def measure_attention(kernels: Kernels, num_heads: int) -> dict[str, Any]:
    """Time the causal core over four prompts."""
    total = PROMPTS * PROMPT_LEN
    q, k = (torch.randn(total, num_heads, 192, device="cuda").bfloat16() for _ in range(2))
    v = torch.randn(total, num_heads, 256, device="cuda").bfloat16()[..., 128:]
    ends = torch.arange(PROMPTS + 1, dtype=torch.int32, device="cuda") * PROMPT_LEN
    lengths = [(PROMPT_LEN, PROMPT_LEN)] * PROMPTS
    seqs = VarlenLengths(lengths=lengths, cu_seqlens_q=ends, cu_seqlens_k=ends)
    seconds = median_seconds(lambda: kernels.attention.varlen_attention(q, k, v, seqs, 0.1352))
    operations = attention_operations(q, v, seqs)
    return {
        "what": f"causal attention {PROMPTS} x {PROMPT_LEN}, {num_heads} heads",
        "ms": seconds * 1e3,
        "tflops": operations * 1e-12 / seconds,
    }


def make_batch() -> ForwardBatch:
    """Return a step of four whole prompts."""
    per_prompt = PROMPT_LEN // BLOCK_SIZE
    tables = np.arange(1, PROMPTS * per_prompt + 1, dtype=np.int32).reshape(PROMPTS, per_prompt)
    lens = np.full(PROMPTS, PROMPT_LEN, dtype=np.int64)
    ids = np.random.default_rng(0).integers(0, 1024, PROMPTS * PROMPT_LEN)
    return pack_forward_batch(
        ids, lens, lens, tables, logits_indices=lens.cumsum() - 1, block_size=BLOCK_SIZE,
        device="cuda",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentGroup(RankGroup):
    """A rank among others that never answer: its own work alone, sums left incomplete."""

    def start_all_reduce(self, tensor: torch.Tensor) -> Pending[torch.Tensor]:
        """Return the tensor as it is."""
        return Ready(tensor)


def silent_groups(ranks: int) -> ProcessGroups:
    """Return the groups of rank 0 of a TP and EP instance."""
    group = SilentGroup(rank=0, size=ranks)
    dims = ParallelDims(tp=ranks, ep=ranks, rank=0)
    return ProcessGroups(dims=dims, tp_group=group, ep_group=group)


def measure_layers(kernels: Kernels, ranks: int) -> list[dict[str, Any]]:
    """Time a dense and a MoE layer whole, and each of them by stage.

    With several ranks: the part of one of them, without communication.
    """
    results = []
    of = f" of one of {ranks} ranks, no communication" if ranks > 1 else ""
    for name, first_dense in (("dense layer", 1), ("MoE layer", 0)):
        config = replace(
            DEEPSEEK_V3, num_hidden_layers=1, first_k_dense_replace=first_dense, vocab_size=1024
        )
        sheet = find_sheet(torch.cuda.get_device_name())
        timer = StageTimer(kernels, None if sheet is None else sheet.rates)
        model = DeepseekV3ForCausalLM(
            config,
            silent_groups(ranks),
            dtype=torch.bfloat16,
            device="cuda",
            kernels=timer.kernels,
            execution=Execution(scatter_tokens=False),
        )
        fill_with_dummy_weights(model)
        pool = build_kv_pool(model, PROMPTS * PROMPT_LEN // BLOCK_SIZE + 1, block_size=BLOCK_SIZE)
        results.append(measure_layer(name + of, model, pool, timer))
        del model, pool
        torch.cuda.empty_cache()
    return results


def measure_layer(
    name: str, model: DeepseekV3ForCausalLM, pool: KVPool, timer: StageTimer
) -> dict[str, Any]:
    """Time one layer: the whole without events inside, then by stage."""
    batch = make_batch()
    step = model.attention.plan(batch, pool)
    hidden = torch.randn(batch.num_tokens, model.config.hidden_size, device="cuda").bfloat16()
    layer = model.model.layers[0]

    def call() -> object:
        return run(layer(Residual(hidden), step))

    whole = median_seconds(call, repeats=7)
    if timer.hardware is not None:
        timer.mode = TimerMode.BOUNDS
        call()
    repeats = 5
    for index in range(repeats + 1):
        # The first pass only lets the host run ahead of the device.
        timer.mode = TimerMode.TIMES if index else TimerMode.OFF
        call()
    torch.cuda.synchronize()
    stages = [
        {
            "stage": stage.name,
            "ms": stage.seconds / repeats * 1e3,
            "share": stage.seconds / repeats / whole,
            "share_of_bound": stage.bound_s * repeats / stage.seconds or None,
        }
        for stage in sorted(timer.stages.values(), key=lambda stage: -stage.seconds)
    ]
    bound = sum(stage.bound_s for stage in timer.stages.values())
    return {
        "what": f"{name}, {batch.num_tokens} tokens",
        "ms": whole * 1e3,
        "bound_ms": bound * 1e3 or None,
        "share_of_bound": bound / whole or None,
        "stages": stages,
    }


def measure_fill() -> dict[str, Any]:
    """Fill rank 0 of the full model over eight ranks with invented weights."""
    model = DeepseekV3ForCausalLM(
        DEEPSEEK_V3, silent_groups(8), dtype=torch.bfloat16, device="cuda"
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    fill_with_dummy_weights(model)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"what": "dummy weights of one of 8 ranks", "s": seconds, "GB": held / 1e9}


def show(results: list[dict[str, Any]]) -> None:
    """Print one line a result, and a table of stages below a layer."""
    for result in results:
        numbers = {k: v for k, v in result.items() if isinstance(v, float)}
        text = "  ".join(f"{key} {value:.3f}" for key, value in numbers.items())
        print(f"{result['what']}: {text}", flush=True)
        for stage in result.get("stages", ()):
            share = stage["share_of_bound"]
            print(
                f"    {stage['stage']:32} {stage['ms']:8.3f} ms  {stage['share']:6.1%} of the layer"
                + (f"  {share:6.1%} of its bound" if share else "  no data sheet of this GPU")
            )


def main() -> None:
    """Measure everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--fill", action="store_true", help="also fill a rank of the full model")
    options = parser.parse_args()
    kernels = create_kernels("cuda")
    results: list[dict[str, Any]] = []

    def keep(new: list[dict[str, Any]]) -> None:
        show(new)
        results.extend(new)

    with torch.inference_mode():
        keep([measure_experts(kernels)])
        torch.cuda.empty_cache()
        keep(measure_dense(kernels))
        keep([measure_attention(kernels, heads) for heads in (16, 128)])
        torch.cuda.empty_cache()
        for ranks in (1, 8):
            keep(measure_layers(kernels, ranks))
        if options.fill:
            keep([measure_fill()])
    if options.json:
        machine = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "kernels": kernels.name,
        }
        text = json.dumps({"machine": machine, "results": results}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
