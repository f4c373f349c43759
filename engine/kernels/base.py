"""What the layers ask of a device: one interface, implemented by a set of kernels per kind of GPU.

A layer calls these and never asks what it runs on. The key idea: an implementation is chosen once,
when the model is built, and travels down the constructors; what each operation computes is written
in `engine.kernels.reference`, which also is the implementation on CPUs.
"""

from typing import Protocol

from torch import Tensor

from engine.attention.kernels import AttentionKernels
from engine.formats.base import Formats
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.alignment import Alignment, RowCounts
from engine.kernels.masked_rows import MaskedPlaces, MaskedRows
from engine.kernels.rotation import Rotation
from engine.kernels.routing import RoutingRule


class Kernels(Protocol):
    """Operations of one device.

    Shapes and meaning: under the same names in `reference`, and for the layouts of experts in
    `aligned_reference` and `masked_reference`.
    """

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def formats(self) -> Formats:
        """In which weights and rows are multiplied."""
        ...

    @property
    def attention(self) -> AttentionKernels:
        """For whoever attends."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm over the last dimension."""
        ...

    def add_rms_norm(
        self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return x + delta and its norm."""
        ...

    def add_rms_norm_fp8(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        *,
        with_plain: bool,
        out: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor | None, Fp8Rows]:
        """Return x + delta, its norm if wanted, and its norm quantised."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Gated activation."""
        ...

    def silu_and_mul_fp8(self, gate_up_TF: Tensor) -> Fp8Rows:
        """Gated activation, then quantise."""
        ...

    def gate_logits(self, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """Scores of all experts, [T, E] float32; or [S, T, E], parts that sum to them."""
        ...

    def group_limited_topk(
        self, logits_TE: Tensor, bias_E: Tensor, rule: RoutingRule, num_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by what `gate_logits` returned, and none for padding."""
        ...

    def count_rows(self, topk_ids_TK: Tensor, first: int, num_experts: int) -> RowCounts:
        """Choose the row of every (token, expert) pair, by int64 or int32 ids; count the rows."""
        ...

    def moe_align_block_size(
        self, topk_ids_TK: Tensor, first: int, num_experts: int, capacity: int | None = None
    ) -> Alignment:
        """Do both without asking the device, for any routing; cut at a capacity, if given."""
        ...

    def permute_rows(self, rows: Fp8Rows, alignment: Alignment) -> Fp8Rows:
        """Copy each token's row to all of its places before the capacity."""
        ...

    def unpermute_rows(
        self,
        source_MD: Tensor,
        places: Alignment | MaskedPlaces,
        weights_TK: Tensor,
        own_TD: Tensor | None,
    ) -> Tensor:
        """Sum each token's rows, weighted."""
        ...

    def moe_align_masked(
        self,
        topk_ids_TK: Tensor,
        first: int,
        num_experts: int,
        max_rows: int,
        *,
        expected_rows: int | None = None,
    ) -> MaskedPlaces:
        """Choose the row of every (token, expert) pair in the masked layout."""
        ...

    def permute_masked_rows(self, rows: Fp8Rows, places: MaskedPlaces) -> MaskedRows:
        """Copy each token's row to all of its places in the masked layout."""
        ...

    def rotate_queries(self, q_THA: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the last part of every head in place."""
        ...

    def store_latents(
        self,
        latents_TL: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> None:
        """Norm, rotate and write latents into the KV pool."""
        ...

    def split_latents(
        self,
        latents_TX: Tensor,
        q_weight_Q: Tensor,
        weight_C: Tensor,
        eps: float,
        rotation: Rotation,
        *,
        cache: Tensor,
        slots_T: Tensor,
    ) -> Fp8Rows:
        """Norm and quantise query latents; do `store_latents` with what lies behind them."""
        ...

    def join_keys(self, k_nope_PHN: Tensor, k_pe_PR: Tensor) -> Tensor:
        """Put keys together."""
        ...
