"""The model that is run, and the name under which its figures may be told.

A host that cannot hold the model measures a part of it. The key idea: whatever is not the whole
model on all of its GPUs carries a label that says what it is, and a figure that is scaled stands
beside the one that was measured, never in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.engine.options import ROUTING_LABELS, Axis, Setup
from bench.engine.plays import PLAYS_LABELS
from bench.shapes import expert_shard, read_shape, tensor_shard, with_layers
from engine.config import DeepseekV3Config


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model and what it stands for.

    Attributes:
        config: as it is run.
        whole: the model that it is a part of; the same object if it is no part.
        num_gpus: ranks that run.
        virtual_gpus: GPUs of the node that the ranks stand for.
        label: what a figure of this run is a figure of.
        notes: how it differs from the whole; `left_out` has what a proxy leaves out.
    """

    config: DeepseekV3Config
    whole: DeepseekV3Config
    num_gpus: int
    virtual_gpus: int
    label: str
    notes: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.config == self.whole and self.num_gpus == self.virtual_gpus

    @property
    def layer_scale(self) -> float:
        """What a time is multiplied with for all layers."""
        return self.whole.num_hidden_layers / self.config.num_hidden_layers


def choose_model(setup: Setup) -> MeasuredModel:
    """Decide what stands for the model on these ranks.

    Raises:
        ConfigError: an unknown shape, or parts that cannot be made.
    """
    whole = read_shape(setup.shape)
    num_gpus, of = setup.world_size, setup.shard_of or setup.world_size
    config, notes = whole, []
    label = f"{setup.shape} on {num_gpus} {_places(setup, num_gpus)}"
    if setup.shard_of:
        shard = tensor_shard if setup.shard_axis is Axis.TP else expert_shard
        config = shard(whole, ranks=num_gpus, of=of)
    if of > num_gpus:
        label = f"per-rank proxy on {num_gpus} {_places(setup, num_gpus)}"
    if setup.layers and setup.layers != whole.num_hidden_layers:
        config = with_layers(config, setup.layers)
        label += f", {setup.layers} of {whole.num_hidden_layers} layers"
        dense = config.first_k_dense_replace
        notes.append(
            f"{config.num_hidden_layers} layers, {dense} of them dense; embedding, head and"
            " sampling are done once, as for all layers"
        )
    if config.num_moe_layers:
        label += f", {ROUTING_LABELS[setup.routing]}"
    if setup.plays:
        label += (
            f", the busiest of {of} ranks among those played, experts {PLAYS_LABELS[setup.plays]}"
        )
    return MeasuredModel(
        config=config,
        whole=whole,
        num_gpus=num_gpus,
        virtual_gpus=of,
        label=label,
        notes=tuple(notes),
    )


def _places(setup: Setup, count: int) -> str:
    kind = "GPU" if setup.device == "cuda" else "CPU rank"
    return kind if count == 1 else f"{kind}s"
