"""Tokens per second: as they were measured, what they stand for, and the bounds of both.

``as_run`` is what the ranks here did. ``node`` is the same for all layers and for all GPUs that the
ranks stand for, under a label that says so; where nothing was left out the two are equal. Bounds
are those of GPUs, so a run on CPUs has no share of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.engine_bench.report import Report
from deploy.engine_bench.shapes import MeasuredModel
from engine.bounds import H200, H200_REACHED, Hardware

HARDWARE: Mapping[str, Hardware] = {"data_sheet": H200, "reached": H200_REACHED}
"""Rates that bounds are computed with: none has been passed, and some have been reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBound:
    """Most tokens per second, if traffic hides behind computing, and if it does not."""

    overlapped: float
    serial: float


Bounds = Mapping[str, RateBound]
"""By the name of the hardware's rates, as in `HARDWARE`."""


def describe_rates(
    measured: MeasuredModel,
    *,
    tokens: int,
    seconds: float,
    ranks_factor: float,
    bounds: tuple[Bounds, Bounds],
    is_gpu: bool,
) -> Report:
    """Make both rates.

    Args:
        measured: the model and what it stands for.
        tokens: of all ranks here in one batch or step.
        seconds: of it.
        ranks_factor: tokens of all GPUs that the ranks stand for, over ``tokens``.
        bounds: of what ran here, and of what it stands for.
        is_gpu: whether shares of the bounds mean anything.
    """
    as_run = tokens / seconds
    node = as_run * ranks_factor / measured.layer_scale
    scaled = f", times scaled by {measured.layer_scale:.3f}" if measured.layer_scale != 1 else ""
    label = f"{measured.label}{scaled}; stands for {measured.virtual_gpus} GPUs and all layers"
    return {
        "as_run": {
            "label": measured.label,
            "num_gpus": measured.num_gpus,
            "tokens": tokens,
            **_rate(as_run, measured.num_gpus, bounds[0], is_gpu),
        },
        "node": {
            "label": measured.label if measured.is_whole else label,
            "num_gpus": measured.virtual_gpus,
            **_rate(node, measured.virtual_gpus, bounds[1], is_gpu),
        },
    }


def _rate(tokens_per_s: float, num_gpus: int, bounds: Bounds, is_gpu: bool) -> Report:
    shares = {name: tokens_per_s / bound.overlapped for name, bound in bounds.items()}
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / num_gpus,
        "bound_tokens_per_s": {name: bound.overlapped for name, bound in bounds.items()},
        "serial_bound_tokens_per_s": {name: bound.serial for name, bound in bounds.items()},
        "share_of_bound": shares if is_gpu else None,
    }
