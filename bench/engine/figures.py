"""Rates of a measurement and their bounds, from the options and what was measured. Pure.

Bounds are those of the device's data sheet; without one (None) there are none, and no shares.
"""

from __future__ import annotations

from bench.bounds import DecodeBound, PrefillTraffic, decode_bound, prefill_bound
from bench.engine.options import DecodeOptions, PrefillOptions
from bench.engine.rates import Bounds, RateBound, describe_rates
from bench.engine.report import Report
from bench.engine.shapes import MeasuredModel
from engine.config import DeepseekV3Config
from experts.data_sheets import DataSheet


def prefill_rates(
    measured: MeasuredModel, options: PrefillOptions, sheet: DataSheet | None, tokens_per_s: float
) -> Report:
    """Both rates of batches of which all ranks here ran so many tokens per second."""
    # Ranks that share heads run the batch of the whole node; ranks with own tokens only theirs.
    has_own = options.setup.has_own_tokens
    factor = measured.virtual_gpus / measured.num_gpus if has_own else 1.0
    return describe_rates(
        measured,
        tokens_per_s=tokens_per_s,
        ranks_factor=factor,
        bounds=(
            _prefill_bounds(measured.config, options, sheet, measured.num_gpus),
            _prefill_bounds(measured.whole, options, sheet, measured.virtual_gpus),
        ),
    )


def decode_rates(
    measured: MeasuredModel,
    options: DecodeOptions,
    sheet: DataSheet | None,
    *,
    tokens_per_s: float,
    mean_context: float,
) -> Report:
    """Both rates of steps, which had contexts of so many tokens in the mean."""
    here, there = measured.num_gpus, measured.virtual_gpus
    return describe_rates(
        measured,
        tokens_per_s=tokens_per_s,
        ranks_factor=there / here,
        bounds=(
            _rates_of(_decode_bounds(measured.config, options, sheet, here, mean_context), here),
            _rates_of(_decode_bounds(measured.whole, options, sheet, there, mean_context), there),
        ),
    )


def describe_layers(
    measured: MeasuredModel,
    options: DecodeOptions,
    sheet: DataSheet | None,
    *,
    model_s: float | None,
    mean_context: float,
) -> Report | None:
    """Microseconds of a layer: embedding to last norm over the layers; None if not captured.

    The bounds are those of what ran here, without head and sampling.
    """
    if model_s is None:
        return None
    config = measured.config
    found = _decode_bounds(config, options, sheet, measured.num_gpus, mean_context)
    bounds = {
        name: bound.layers_s / config.num_hidden_layers * 1e6 for name, bound in found.items()
    }
    layer = model_s / config.num_hidden_layers * 1e6
    return {
        "us_per_layer": layer,
        "num_layers": config.num_hidden_layers,
        "num_dense_layers": config.first_k_dense_replace,
        "bound_us": bounds,
        "share_of_bound": {name: bound / layer for name, bound in bounds.items()} or None,
    }


def _prefill_bounds(
    config: DeepseekV3Config, options: PrefillOptions, sheet: DataSheet | None, num_gpus: int
) -> Bounds:
    # The arithmetic of bounds is of whole prompts.
    if sheet is None or options.cached_len:
        return {}
    is_scattered = options.section.is_scattered
    traffic = PrefillTraffic.LATENTS_FP8 if is_scattered else PrefillTraffic.ALL_REDUCE
    if options.setup.has_own_tokens:
        traffic = PrefillTraffic.ALL_TO_ALL
    found = {
        name: prefill_bound(
            config, options.prompt_len, num_gpus=num_gpus, traffic=traffic, hardware=hardware
        )
        for name, hardware in sheet.by_name.items()
    }
    return {
        name: RateBound(overlapped=bound.overlapped, serial=bound.serial)
        for name, bound in found.items()
    }


def _decode_bounds(
    config: DeepseekV3Config,
    options: DecodeOptions,
    sheet: DataSheet | None,
    ep: int,
    mean_context: float,
) -> dict[str, DecodeBound]:
    """Those of equal ranks: a step of unequal ones has no bound here."""
    if sheet is None or not options.is_equal:
        return {}
    kv_bytes = config.latent_dim * (1 if options.section.kv_dtype == "fp8" else 2)
    return {
        name: decode_bound(
            config,
            options.requests[0],
            mean_context,
            ep=ep,
            kv_bytes=kv_bytes,
            hardware=hardware,
        )
        for name, hardware in sheet.by_name.items()
    }


def _rates_of(bounds: dict[str, DecodeBound], num_gpus: int) -> Bounds:
    return {
        name: RateBound(
            overlapped=bound.tokens_per_s(num_gpus),
            serial=bound.tokens_per_s(num_gpus, serial=True),
        )
        for name, bound in bounds.items()
    }
