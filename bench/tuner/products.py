"""The products in FP8 of one rank of a model, as shapes: arithmetic on the configuration.

A rank's share follows from `tp` and `ep` as in the layers (`engine.layers`); products that a
checkpoint of this shape would not hold in FP8 are left out. Rows are chosen in three kinds: tokens
of a step for plain products, rows of each expert for grouped ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.config import DeepseekV3Config
from engine.formats.fp8_rows import GROUP
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout
from engine.kernels.alignment import ROW_BLOCK
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Numbers of rows to measure: of plain products, and of each expert in both layouts."""

    plain: Sequence[int] = (1, 16, 64, 256, 1024, 4096, 16384)
    aligned: Sequence[int] = (128, 512, 2048)
    masked: Sequence[int] = (8, 32, 128)


def model_products(
    config: DeepseekV3Config, *, tp: int, ep: int, rows: RowCounts
) -> tuple[ProductShape, ...]:
    """Return what one of `tp` ranks multiplies, its experts being one of `ep` parts.

    Raises:
        ConfigError: sizes that cannot be divided.
    """
    plain = [
        ProductShape(layout=RowLayout.PLAIN, num_rows=m, num_columns=n, depth=k)
        for n, k in dict.fromkeys(_plain_sizes(config, tp))
        for m in rows.plain
    ]
    experts = _divide("ep", config.n_routed_experts, ep) if config.num_moe_layers else 0
    width = config.moe_intermediate_size
    width = _divide("tp", width, tp) if ep == 1 else width
    grouped = [
        ProductShape(layout=layout, num_rows=m, num_columns=n, depth=k, num_experts=experts)
        for n, k in ((2 * width, config.hidden_size), (config.hidden_size, width))
        for layout, counts in (
            (RowLayout.ALIGNED, [_round_up(m) * experts for m in rows.aligned]),
            (RowLayout.MASKED, rows.masked),
        )
        for m in counts
        if experts
    ]
    return tuple(shape for shape in (*plain, *grouped) if shape.depth % GROUP == 0)


def _plain_sizes(config: DeepseekV3Config, tp: int) -> Iterator[tuple[int, int]]:
    """Yield N and K."""
    hidden, heads = config.hidden_size, _divide("tp", config.num_attention_heads, tp)
    if config.q_lora_rank is None:
        yield config.latent_dim, hidden
        yield heads * config.qk_head_dim, hidden
    else:
        yield config.q_lora_rank + config.latent_dim, hidden
        yield heads * config.qk_head_dim, config.q_lora_rank
    yield heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank
    yield hidden, heads * config.v_head_dim
    widths = []
    if config.first_k_dense_replace:
        widths.append(_divide("tp", config.intermediate_size, tp))
    if config.num_moe_layers and config.n_shared_experts:
        shared = config.moe_intermediate_size * config.n_shared_experts
        # Whole where a rank runs the shared experts on tokens of its own.
        widths += [shared, _divide("tp", shared, tp)]
    for width in widths:
        yield 2 * width, hidden
        yield hidden, width


def _divide(name: str, size: int, parts: int) -> int:
    if parts < 1 or size % parts:
        fitting = [n for n in range(1, size + 1) if size % n == 0]
        fix = ", ".join(map(str, fitting[:12]))
        raise ConfigError(f"--{name}", parts, f"does not divide {size}", fix)
    return size // parts


def _round_up(rows: int) -> int:
    return -(-rows // ROW_BLOCK) * ROW_BLOCK
