"""Context extension by YaRN, as numbers (https://arxiv.org/abs/2309.00071)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """What a checkpoint says of YaRN; `engine.layers.rotary` makes angles of it.

    Attributes:
        factor: by which the context is stretched.
        original_max_position_embeddings: positions that the model was trained on before.
        beta_fast: a pair that turns more often over these keeps its frequency.
        beta_slow: one that turns less often is stretched by the whole factor.
        mscale: and `mscale_all_dim`: temperatures of cos and sin, and of attention; 0 for none.
        attention_factor: of cos and sin, in place of what the two make; None for that.
        truncate: whether the borders between kept and stretched pairs are whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
