"""The causal core of prefill, 192/128 wide, by every library that is installed.

Run ``python -m bench.kernels.attention_rivals --json OUT.json`` on a Hopper GPU with the `gpu`
extra; to have FlashInfer in the table, install `flashinfer-python` beside it (it compiles for a
minute or two the first time). Each library gets the same random tensors; its result is compared
with that of the library that the engine uses before it is timed. Times are medians of device
events.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.device_time import median_seconds
from bench.stage_timer import attention_operations
from engine.attention.flash_attention import FlashAttention
from engine.attention.kernels import VarlenLengths

DEVICE = torch.device("cuda")
SCALE = 0.1352338
WORKSPACE_BYTES = 512 * 2**20
TOLERANCE = 2e-2
"""Relative, by norms: all of them round probabilities to bfloat16, each in its own order."""


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences of equal length."""

    num_seqs: int
    num_queries: int
    num_positions: int
    num_heads: int

    def __str__(self) -> str:
        prefix = self.num_positions - self.num_queries
        behind = f" behind {prefix}" if prefix else ""
        return f"{self.num_seqs} x {self.num_queries}{behind}, {self.num_heads} heads"

    def lengths(self) -> VarlenLengths:
        """Return them as the kernels take them."""
        ends = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=DEVICE)
        return VarlenLengths(
            lengths=[(self.num_queries, self.num_positions)] * self.num_seqs,
            cu_seqlens_q=ends * self.num_queries,
            cu_seqlens_k=ends * self.num_positions,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, 192], keys [P, H, 192] and values [P, H, 128], random."""
        queries = self.num_seqs * self.num_queries
        positions = self.num_seqs * self.num_positions
        q = torch.randn(queries, self.num_heads, 192, device=DEVICE).bfloat16()
        k = torch.randn(positions, self.num_heads, 192, device=DEVICE).bfloat16()
        v = torch.randn(positions, self.num_heads, 128, device=DEVICE).bfloat16()
        return q, k, v


CASES = (
    Case(4, 4096, 4096, 16),
    Case(4, 4096, 4096, 128),
    Case(16, 1024, 1024, 16),
    Case(1, 4096, 16384, 16),
)


def flash_attention_4(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """What the engine calls."""
    library, seqs = FlashAttention(), case.lengths()
    return lambda: library.varlen_attention(q, k, v, seqs, SCALE)


def flashinfer_fa3(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """FlashInfer's kernel for Hopper; the plan is made once and not timed."""
    library = importlib.import_module("flashinfer")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
    seqs = case.lengths()
    wrapper.plan(
        seqs.cu_seqlens_q, seqs.cu_seqlens_k, case.num_heads, case.num_heads, 192,
        head_dim_vo=128, causal=True, sm_scale=SCALE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: wrapper.run(q, k, v)


def cudnn(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """PyTorch's way to cuDNN, for whole prompts of one length only."""
    if case.num_queries != case.num_positions:
        raise ValueError("needs as many queries as positions")

    def heads_first(x: Tensor) -> Tensor:
        return x.view(case.num_seqs, case.num_positions, case.num_heads, -1).transpose(1, 2)

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                heads_first(q), heads_first(k), heads_first(v), is_causal=True, scale=SCALE
            )
        return out.transpose(1, 2).reshape(-1, case.num_heads, 128)

    return run


RIVALS = {
    "FlashAttention-4": flash_attention_4,
    "FlashInfer (fa3)": flashinfer_fa3,
    "cuDNN by PyTorch": cudnn,
}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm."""
    difference = (got.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


def measure_case(case: Case) -> list[dict[str, Any]]:
    """Compare and time all libraries; one that cannot do the case says why."""
    q, k, v = case.tensors()
    operations = attention_operations(q, v, case.lengths())
    expected: Tensor | None = None
    results: list[dict[str, Any]] = []
    for name, prepare in RIVALS.items():
        row: dict[str, Any] = {"case": str(case), "library": name}
        try:
            call = prepare(case, q, k, v)
            got = call()
        except (ImportError, RuntimeError, ValueError) as error:
            row["not_run"] = (str(error).splitlines() or [type(error).__name__])[0]
            results.append(row)
            continue
        expected = got if expected is None else expected
        row["relative_error"] = relative_error(got, expected)
        if row["relative_error"] < TOLERANCE:
            seconds = median_seconds(call)
            row |= {"ms": seconds * 1e3, "tflops": operations * 1e-12 / seconds}
        results.append(row)
    return results


@torch.inference_mode()
def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name()}]
    for case in CASES:
        results += measure_case(case)
    for row in results:
        print(
            " | ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in row.items())
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
