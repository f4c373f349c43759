"""The seam between a model, its KV pool and what attends for it.

A backend is chosen when the model is built, for a kind of attention and a device; the layers hand
it what they have projected, and know nothing of pages, masks or kernels. Called on the thread that
launches steps; `plan` may wait for the device where a step of fixed shape keeps its lengths there,
the other two only launch. The pool belongs to the worker; nothing of a step is kept.
"""

from typing import Protocol, TypeVar

from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.kernels.fp8_rows import Activation
from engine.memory.kv_pool import KVPool

StepT = TypeVar("StepT")
"""What the layers of a step share."""
StoredT_contra = TypeVar("StoredT_contra", contravariant=True)
"""What a layer leaves in the pool for T tokens."""
QueriesT_contra = TypeVar("QueriesT_contra", contravariant=True)
"""What a layer asks with for T tokens."""


class AttentionBackend(Protocol[StepT, StoredT_contra, QueriesT_contra]):
    """Attention of a whole model on one rank, for any number of queries a sequence."""

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer of the pool on this rank."""
        ...

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> StepT:
        """Prepare what all layers of a step share.

        Args:
            batch: of the step; each sequence runs 1 or more tokens, the last ones of its context.
            kv_pool: of `kv_spec`, with a layer for each decoder layer.
        """
        ...

    def store(self, stored: StoredT_contra, layer_index: int, step: StepT) -> None:
        """Write the step's tokens into a layer of the pool, before the layer attends."""
        ...

    def attend(self, queries: QueriesT_contra, layer_index: int, step: StepT) -> Activation:
        """Attend to all that the sequences have in a layer up to each token itself.

        Returns:
            [T, H * V], of this rank's H heads.
        """
        ...
