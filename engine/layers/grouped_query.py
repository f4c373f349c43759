"""Grouped-query attention as a layer: project, rotate, hand to the backend, project back.

Heads are split over the tp ranks, query heads and the key-value heads that they share alike. Where
the ranks keep shares of the hidden states, those of all tokens are gathered first.

Legend: T tokens, t rows of this rank, D hidden size, H query heads and G key-value heads of this
rank, A head size.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from engine.attention.backend import AttentionBackend
from engine.attention.grouped import GroupedStep, KeysValues
from engine.kernels.rotation import Rotation
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.operations import Operations
from engine.ops.latents import ROTATE_QUERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """Heads of all ranks.

    Attributes:
        queries: query heads.
        keys: key-value heads, of which `queries` is a multiple.
        width: numbers of one.
    """

    queries: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedStep:
    """What layers need beside the hidden states: the backend's plan, and the angles."""

    plan: GroupedStep
    rotation: Rotation


class GroupedQueryAttention(nn.Module):
    """Attention of layer `layer_index`, which is also its place in the KV pool."""

    def __init__(
        self,
        ctx: LayerContext,
        hidden_size: int,
        heads: HeadSizes,
        backend: AttentionBackend[GroupedStep, KeysValues, Tensor],
        layer_index: int,
    ) -> None:
        super().__init__()
        self._sharding, self._backend = ctx.sharding, backend
        self._rotate_queries = ctx.ops[ROTATE_QUERIES]
        self.layer_index, self.head_width = layer_index, heads.width
        widths = {
            "q_proj": heads.queries * heads.width,
            "k_proj": heads.keys * heads.width,
            "v_proj": heads.keys * heads.width,
        }
        self.qkv_proj = ColumnParallelLinear(ctx, hidden_size, widths)
        self.o_proj = RowParallelLinear(ctx.within("o_proj"), widths["q_proj"], hidden_size)
        self._widths = [width // ctx.groups.tp_group.size for width in widths.values()]

    def forward(self, hidden: Tensor, step: RotatedStep) -> Operations[Tensor]:
        """Attend; writes this step's keys and values into the pool first.

        Args:
            hidden: [t, D], normalised.
            step: of the running batch.

        Returns:
            [t, D], complete.
        """
        num_tokens = step.plan.slot_mapping.shape[0]
        gathering = self._sharding.start_gather_padded(hidden)
        yield
        rows = gathering.wait()
        assert isinstance(rows, Tensor)
        queries, keys, values = (
            part.unflatten(1, (-1, self.head_width))
            for part in self.qkv_proj(rows)[:num_tokens].split(self._widths, dim=1)
        )
        keys = self._rotate_queries(keys, step.rotation)
        self._backend.store(
            KeysValues(keys_TGD=keys, values_TGD=values), self.layer_index, step.plan
        )
        queries = self._rotate_queries(queries, step.rotation)
        attended = self._backend.attend(queries, self.layer_index, step.plan)
        assert isinstance(attended, Tensor)
        reducing = self._sharding.start_reduce(self.o_proj(self._sharding.pad(attended)))
        yield
        return reducing.wait()
