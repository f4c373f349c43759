"""The angles of a step's tokens, as every layer's rotation reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary angles of T tokens.

    Attributes:
        cos: [T, R / 2] float32.
        sin: [T, R / 2] float32.
        interleave: pairs are (0, 1), (2, 3), ... as in DeepSeek checkpoints, else (i, i + R / 2).
    """

    cos: Tensor
    sin: Tensor
    interleave: bool = True
