"""Time every kernel call of a forward pass on a GPU, by stage, beside its bound.

Wraps a set of kernels in one that records events around each call; the model does not know. A
stage's bound is the larger of its operations over the unit's peak and its least bytes over the
memory's bandwidth, so its share says how far the stage is from what the chip can do. What happens
between calls (residual sums, gathers, planning) is left over in the total.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from engine.kernels.base import Kernels, VarlenLengths
from engine.kernels.fp8_rows import Fp8Rows

PEAK_FP8 = 1979e12
"""Dense FP8 operations per second of an H100 or H200 (data sheet)."""

PEAK_BF16 = 989e12
"""Dense bfloat16 operations per second of an H100 or H200 (data sheet)."""

BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory (data sheet)."""


class TimerMode(Enum):
    """Bounds are computed apart from times, because counting rows waits for the device."""

    OFF = auto()
    BOUNDS = auto()
    TIMES = auto()


@dataclass(slots=True)
class Stage:
    """One kind of call, summed over a pass."""

    name: str
    bound_s: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Device time; the events must have happened."""
        return sum(float(first.elapsed_time(last)) for first, last in self.events) / 1e3


class StageTimer:
    """A `Kernels` that times another one; use as the model's kernels.

    Attributes:
        mode: what is done beside the calls.
        stages: what was measured since `reset`, by name.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.mode = TimerMode.OFF
        self.stages: dict[str, Stage] = {}

    def reset(self) -> None:
        """Forget what was measured."""
        self.stages = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        return self._wrap(name, value) if callable(value) else value

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.mode is TimerMode.OFF:
                return call(*args, **kwargs)
            label = stage_name(name, args)
            stage = self.stages.setdefault(label, Stage(label))
            if self.mode is TimerMode.BOUNDS:
                result = call(*args, **kwargs)
                stage.bound_s += bound_s(name, args, result)
                return result
            first, last = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            first.record()
            result = call(*args, **kwargs)
            last.record()
            stage.events.append((first, last))
            return result

        return timed


def stage_name(name: str, args: tuple[Any, ...]) -> str:
    """Return the name of a call; products are told apart by their weight's shape."""
    if name == "fp8_linear":
        rows, columns = args[1].shape
        return f"{name} {rows}x{columns}"
    if name in ("quantize_rows", "rms_norm_fp8", "rms_norm", "silu_and_mul_fp8"):
        return f"{name} {args[0].shape[-1]}"
    return name


def bound_s(name: str, args: tuple[Any, ...], result: Any) -> float:
    """Return the least seconds that a call could take: by operations or by bytes."""
    moved = sum(_nbytes(item) for item in (*args, result))
    operations, peak = 0.0, PEAK_FP8
    if name == "fp8_linear":
        operations = 2.0 * args[0].num_rows * args[1].numel()
    elif name == "grouped_fp8_mlp":
        rows, (w13, _), (w2, _) = args[0], args[2], args[3]
        used = int((args[1] >= 0).sum())
        operations = 2.0 * used * (w13[0].numel() + w2[0].numel())
        moved = (moved - _nbytes(rows) - _nbytes(result)) + used * rows.data_TK.shape[1] * 3
    elif name == "varlen_attention":
        operations, peak = attention_operations(args[0], args[2], args[3]), PEAK_BF16
    elif name == "gate_logits":
        operations, peak = 2.0 * args[0].shape[0] * args[1].numel(), PEAK_BF16
    elif name == "gather_rows":
        pairs = int((args[1].rows_TK >= 0).sum())
        moved += (pairs - args[0].shape[0]) * args[0].shape[1] * args[0].element_size()
    elif name == "spread_rows":
        pairs = int((args[1].rows_TK >= 0).sum())
        moved += (pairs - result.num_rows) * result.data_TK.shape[1]
    elif name in ("rotate_queries", "store_latents"):
        return 0.0 if name == "store_latents" else _nbytes(result) * 2 / 3 / BANDWIDTH
    return max(operations / peak, moved / BANDWIDTH)


def attention_operations(q_THA: Tensor, v_PHV: Tensor, seqs: VarlenLengths) -> float:
    """Return the operations of causal attention: 2 per (visible pair, head, number)."""
    pairs = sum(q * (p - q) + q * (q + 1) / 2 for q, p in seqs.lengths)
    return 2.0 * pairs * q_THA.shape[1] * (q_THA.shape[2] + v_PHV.shape[2])


def _nbytes(item: Any) -> int:
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, Fp8Rows):
        return item.data_TK.numel() + 4 * item.scale_TG.numel()
    if isinstance(item, tuple):
        return sum(_nbytes(part) for part in item)
    return 0
