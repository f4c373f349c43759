"""Tokens per second: as they were measured, what they stand for, and the bounds of both.

``as_run`` is what the ranks here did. ``node`` is the same for all layers and for all GPUs that the
ranks stand for, under a label that says so; where nothing was left out the two are equal. Bounds
are those of the GPU that ran, by its data sheet; without one there is no bound and no share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.engine.report import Report
from bench.engine.shapes import MeasuredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBound:
    """Most tokens per second, if traffic hides behind computing, and if it does not."""

    overlapped: float
    serial: float


Bounds = Mapping[str, RateBound]
"""By the name of the rates, as in `DataSheet.by_name`; empty where none are known."""


def describe_rates(
    measured: MeasuredModel,
    *,
    tokens_per_s: float,
    ranks_factor: float,
    bounds: tuple[Bounds, Bounds],
) -> Report:
    """Make both rates.

    Args:
        measured: the model and what it stands for.
        tokens_per_s: of all ranks here.
        ranks_factor: tokens of all GPUs that the ranks stand for, over those of the ranks here.
        bounds: of what ran here, and of what it stands for.
    """
    node = tokens_per_s * ranks_factor / measured.layer_scale
    scaled = f", times scaled by {measured.layer_scale:.3f}" if measured.layer_scale != 1 else ""
    label = f"{measured.label}{scaled}; stands for {measured.virtual_gpus} GPUs and all layers"
    return {
        "as_run": {
            "label": measured.label,
            "num_gpus": measured.num_gpus,
            **_rate(tokens_per_s, measured.num_gpus, bounds[0]),
        },
        "node": {
            "label": measured.label if measured.is_whole else label,
            "num_gpus": measured.virtual_gpus,
            **_rate(node, measured.virtual_gpus, bounds[1]),
        },
    }


def _rate(tokens_per_s: float, num_gpus: int, bounds: Bounds) -> Report:
    shares = {name: tokens_per_s / bound.overlapped for name, bound in bounds.items()}
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_gpu": tokens_per_s / num_gpus,
        "bound_tokens_per_s": {name: bound.overlapped for name, bound in bounds.items()},
        "serial_bound_tokens_per_s": {name: bound.serial for name, bound in bounds.items()},
        "share_of_bound": shares or None,
    }
