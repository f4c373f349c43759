"""What a token leaves in each layer of the KV pool, as numbers.

A model says it; the pool, its layout for transfers and the budget of its memory follow it, and know
of no architecture. Pure numbers: no tensors, no devices.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Numbers of one token in one layer: `num_heads` times `head_width`.

    Attributes:
        num_heads: key-value heads that are kept apart; 1 for what all heads share.
        head_width: numbers of one of them: of a latent all of it, else of its key and its value.
        is_split: whether each tensor-parallel rank keeps its own heads; false where every rank
            keeps all.
    """

    num_heads: int = 1
    head_width: int
    is_split: bool = False

    @classmethod
    def shared(cls, width: int) -> "KVSpec":
        """Return what every rank keeps whole: `width` numbers that all heads share."""
        return cls(head_width=width)

    @property
    def width(self) -> int:
        """Numbers of one token in one layer."""
        return self.num_heads * self.head_width

    def on_rank(self, tp: int) -> "KVSpec":
        """Return what one of `tp` ranks keeps; `ParallelDims.check_model` has seen that it fits."""
        if not self.is_split:
            return self
        assert self.num_heads % tp == 0, (self, tp)
        return replace(self, num_heads=self.num_heads // tp)

    def layer_shape(self, block_size: int) -> tuple[int, ...]:
        """Return how one layer of one block lies: by heads where they are split, then by tokens.

        So the heads of a rank are one run of memory, on a rank that has only these as on one that
        has all.
        """
        tokens = (block_size, self.head_width)
        return (self.num_heads, *tokens) if self.is_split else tokens
