"""Which blocks a step completes, and handing them to this rank's sender as their layers finish.

A block is sent once, when its last token is computed; the last block of a context is usually
partial and goes with the last chunk. Blocks that decode holds already are never sent. Blocks that
our own prefix cache gave and decode lacks are complete before the first chunk, so they go with it.
With layer groups, a group of all of a step's complete blocks is handed over while the model
computes the next group; without, all layers are handed over after the step.

Every rank gets the same pushes in the same order; its sender takes the part that is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefill.commands import PushBlocks
from prefill.request import Chunk

ReadyCheck = Callable[[], bool]


class BlockSender(Protocol):
    """The way out of this rank."""

    def push(
        self,
        nonce: int,
        src_block_ids: Sequence[int],
        first_block_index: int,
        *,
        layers: tuple[int, int],
        ready: ReadyCheck | None,
    ) -> None:
        """Send our part of the blocks, layers [a, b), once `ready` says True; never blocks."""
        ...


def plan_pushes(chunks: Sequence[Chunk], block_size: int) -> list[PushBlocks]:
    """Return what is complete after `chunks` are computed and was not planned before.

    Marks it as planned (`num_pushed_blocks`): call it once a step.
    """
    pushes: list[PushBlocks] = []
    for chunk in chunks:
        item = chunk.item
        num_complete = chunk.scheduled.end // block_size
        if chunk.is_last:
            num_complete = item.num_context_blocks(block_size)
        first = item.num_pushed_blocks
        if item.decode_goes_on and num_complete > first:
            block_ids = tuple(item.request.block_table[first:num_complete])
            ticket_index = first - item.granted.num_cached_blocks
            pushes.append(PushBlocks(item.nonce, ticket_index, block_ids))
            item.num_pushed_blocks = num_complete
    return pushes


def always_ready() -> ReadyCheck | None:
    """On a CPU the call itself says that the KV is written."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushSettings:
    """How a rank groups layers.

    Attributes:
        num_layers: layers of the KV pool, all of which are sent.
        layers_per_group: layers that are pushed together; 0 is all.
        record_ready: makes the check that all KV issued so far has been written (a device event);
            returns None where nothing has to be waited for.
    """

    num_layers: int
    layers_per_group: int = 0
    record_ready: Callable[[], ReadyCheck | None] = always_ready


class StepPusher:
    """Hands the pushes of one step to the sender, layer group by layer group."""

    def __init__(
        self, sender: BlockSender, pushes: Sequence[PushBlocks], settings: PushSettings
    ) -> None:
        self._sender = sender
        self._pushes = pushes
        self._settings = settings
        self._num_pushed_layers = 0

    def on_layer_done(self, layer: int) -> None:
        """Push the group that ends with `layer`, if one does. Called in order of layers."""
        group = self._settings.layers_per_group
        if group and layer + 1 - self._num_pushed_layers >= group:
            self._push_layers(layer + 1)

    def finish(self) -> None:
        """Push what is left after the forward pass."""
        self._push_layers(self._settings.num_layers)

    def _push_layers(self, end: int) -> None:
        first = self._num_pushed_layers
        if end <= first or not self._pushes:
            return
        ready = self._settings.record_ready()
        for push in self._pushes:
            self._sender.push(
                push.nonce,
                push.src_block_ids,
                push.first_block_index,
                layers=(first, end),
                ready=ready,
            )
        self._num_pushed_layers = end
