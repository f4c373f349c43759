"""Plan which weights are asked for where: what is read first behind each point, up to a budget."""

from collections.abc import Sequence

from torch import Tensor

from engine.ahead import PrefetchBudget
from engine.kernels.ahead import AheadKernels
from engine.kernels.weight_chunks import first_chunks
from engine.layers.moe import MoE
from engine.layers.weight_prefetch import PrefetchPoint, WeightPrefetch
from engine.model.decoder_layer import DecoderLayer


def plan_prefetch(
    layers: Sequence[DecoderLayer], budget: PrefetchBudget, kernels: AheadKernels
) -> None:
    """Give every layer its plan, in place of what it had; weights must not move afterwards.

    Args:
        layers: in the order in which they run.
        budget: bytes per point; 0 for no prefetch there.
        kernels: that ask.
    """
    sizes = {
        PrefetchPoint.ATTENTION: budget.attention,
        PrefetchPoint.DISPATCH: budget.dispatch,
        PrefetchPoint.COMBINE: budget.combine,
    }
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        wanted = weights_behind(layer, following)
        found = {point: first_chunks(wanted[point], sizes[point]) for point in PrefetchPoint}
        plan = WeightPrefetch(
            kernels=kernels,
            chunks={point: chunks for point, chunks in found.items() if chunks is not None},
        )
        layer.self_attn.prefetch = plan
        if isinstance(layer.mlp, MoE):
            layer.mlp.prefetch = plan


def weights_behind(
    layer: DecoderLayer, following: DecoderLayer | None
) -> dict[PrefetchPoint, list[Tensor]]:
    """Return the large weights that are read behind each point, the first one first."""
    wanted = {point: list[Tensor]() for point in PrefetchPoint}
    wanted[PrefetchPoint.ATTENTION] = [layer.self_attn.o_proj.weight]
    if isinstance(layer.mlp, MoE):
        wanted[PrefetchPoint.DISPATCH] = [layer.mlp.experts.w13]
        if following is not None:
            wanted[PrefetchPoint.COMBINE] = following.self_attn.first_weights()
    return wanted
