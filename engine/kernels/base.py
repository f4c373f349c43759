"""What the layers ask of a device: one interface, implemented by a set of kernels per kind of GPU.

A layer calls these and never asks what it runs on. The key idea: an implementation is chosen once,
when the model is built, and travels down the constructors; what each operation computes is written
in `engine.kernels.reference`, which also is the implementation on CPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.kernels.alignment import Overflow
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.rotation import Rotation
from engine.ops.op import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenLengths:
    """Sequences of a step that attend together, one after another.

    Attributes:
        lengths: per sequence its queries and its positions.
        cu_seqlens_q: [S + 1] int32 on the device, running sum of the queries.
        cu_seqlens_k: [S + 1] int32 on the device, running sum of the positions.
    """

    lengths: Sequence[tuple[int, int]]
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


class Kernels(Protocol):
    """Operations of one device.

    Shapes and meaning: under the same names in `reference`, for the layouts of experts in
    `aligned_reference` and `masked_reference`, and for decode's attention in `absorb_reference` and
    `paged_reference`.
    """

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def has_fp8(self) -> bool:
        """Whether block-FP8 weights are multiplied as they are stored.

        If not, they are dequantised at load, and none of the `fp8` operations is called.
        """
        ...

    @property
    def ops(self) -> Ops:
        """The table of all other operations, resolved for the device."""
        ...

    @property
    def max_attention_positions(self) -> int:
        """Context tokens that are expanded and attended to in one call.

        A longer context is attended to in parts. 0: one sequence a call, whatever its length.
        """
        ...

    def why_no_pages(self, cache: Tensor, kv_lora_rank: int) -> str:
        """Return why attention does not read layers like `cache` by block tables, or nothing.

        If there is a reason, neither `plan_paged` nor `paged_attention` is called.
        """
        ...

    def quantize_rows(self, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
        """Quantise in groups of 128, into `out` if given."""
        ...

    def fp8_linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Product with a block-quantised weight: [T, N] bfloat16."""
        ...

    def grouped_mlp(
        self, rows_MD: Tensor, num_rows_per_expert: Sequence[int], w13: Tensor, w2: Tensor
    ) -> Tensor:
        """Experts in the compute dtype over rows sorted by expert."""
        ...

    def grouped_fp8_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor:
        """Experts in FP8 over aligned rows, weights as (e4m3, scales): [M, D] bfloat16."""
        ...

    def masked_fp8_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Experts in FP8 over masked rows: [L, M, D] bfloat16."""
        ...

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Causal attention of several sequences with decompressed heads."""
        ...

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
        """Attention to a part of the positions, and the logarithm of its weight."""
        ...

    def merge_attention(
        self, out_THV: Tensor, lse_HT: Tensor, other_THV: Tensor, other_lse_HT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Merge two parts, in place of the first."""
        ...

    def absorbed_attention(
        self,
        q_SQHL: Tensor,
        latents_SPL: Tensor,
        hidden_SQP: Tensor,
        kv_lora_rank: int,
        scale: float,
    ) -> Tensor:
        """Attention over latents."""
        ...

    def plan_paged(self, queries: PagedQueries, cache: Tensor, num_heads: int) -> PagedQueries:
        """Add what attention to layers like `cache` prepares once a step, without a host read."""
        ...

    def absorb_queries(
        self, q_THA: Tensor, weight_HNC: Tensor, rotation: Rotation, cache: Tensor
    ) -> Tensor:
        """Rotate queries and carry them into the latent space, for attention to `cache`."""
        ...

    def expand_values(self, latents_THC: Tensor, weight_HVC: Tensor, *, fp8: bool) -> Activation:
        """Take what was attended to out of the latent space: [T, H * V]."""
        ...

    def paged_attention(
        self, q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
    ) -> Tensor:
        """Attention over latents in the pool, found by block tables."""
        ...
