"""Attention of decompressed heads by the first implementation that takes them.

Which heads a model has is known at its first step, so the choice is made there, once for each kind
of heads, and said in one line: as a warning where it is not the best implementation there is here.
"""

import logging

import torch
from torch import Tensor

from engine.attention.kernels import VarlenAttention, VarlenLengths

logger = logging.getLogger(__name__)


class AttentionChoice:
    """A `VarlenAttention` made of others, the fastest first; the last takes all heads."""

    def __init__(self, *choices: VarlenAttention) -> None:
        self._choices = choices
        self._chosen: dict[tuple[int, int, torch.dtype, str], VarlenAttention] = {}

    def takes(self, q_THA: Tensor, v_PHV: Tensor) -> bool:
        """See `VarlenAttention`."""
        return any(choice.takes(q_THA, v_PHV) for choice in self._choices)

    def describe(self, q_THA: Tensor, v_PHV: Tensor) -> str:
        """See `VarlenAttention`."""
        return self._of(q_THA, v_PHV).describe(q_THA, v_PHV)

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """See `VarlenAttention`."""
        return self._of(q_THA, v_PHV).varlen_attention(q_THA, k_PHA, v_PHV, seqs, scale)

    def varlen_attention_part(
        self,
        q_THA: Tensor,
        k_PHA: Tensor,
        v_PHV: Tensor,
        seqs: VarlenLengths,
        scale: float,
        *,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenAttention`."""
        return self._of(q_THA, v_PHV).varlen_attention_part(
            q_THA, k_PHA, v_PHV, seqs, scale, is_causal=is_causal
        )

    def _of(self, q_THA: Tensor, v_PHV: Tensor) -> VarlenAttention:
        kind = (q_THA.shape[2], v_PHV.shape[2], q_THA.dtype, q_THA.device.type)
        if kind not in self._chosen:
            self._chosen[kind] = self._choose(q_THA, v_PHV)
        return self._chosen[kind]

    def _choose(self, q_THA: Tensor, v_PHV: Tensor) -> VarlenAttention:
        first = self._choices[0]
        chosen = next(choice for choice in self._choices if choice.takes(q_THA, v_PHV))
        heads = f"{q_THA.shape[2]} and {v_PHV.shape[2]} numbers in {q_THA.dtype}"
        by = chosen.describe(q_THA, v_PHV)
        if chosen is first:
            logger.info("attention of heads of %s is by %s", heads, by)
        else:
            other = first.describe(q_THA, v_PHV)
            logger.warning(
                "attention of heads of %s is slower than it could be: by %s, as %s does not take"
                " them", heads, by, other,
            )  # fmt: skip
        return chosen
