"""The bytes of the KV cache of one rank, page-major.

Storage is `data[num_blocks, num_layers, ...]`, and within a layer what the model's `KVSpec` says:
`[block_size, width]` for what all heads share, `[heads, block_size, width]` where heads have their
own. A block of all layers is one contiguous run, which is what a transfer moves, and `layer(i)` is
the strided view `[num_blocks, ...]` that attention reads. A slot is block_id * block_size + offset.
Who owns a block is the business of the `BlockPool`. The memory is zeroed once, at start,
and never moves, so that its address can be registered with a transport.
"""

from collections.abc import Sequence

import torch

from engine.attention.kv_spec import KVSpec
from engine.attention.latent_storage import take_blocks


class KVPool:
    """KV of `num_blocks` blocks, block 0 being the dummy."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        kv_spec: KVSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        num_mtp_layers: int = 0,
    ) -> None:
        """Allocate and zero the pool.

        Args:
            num_blocks: blocks, the dummy block 0 included.
            num_layers: layers with KV (those for multi-token prediction are the last ones).
            block_size: tokens per block.
            kv_spec: what a token leaves in each layer on this rank.
            dtype: of the storage.
            device: of the storage.
            num_mtp_layers: how many of the layers are for multi-token prediction.
        """
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.num_mtp_layers = num_mtp_layers
        self.block_size = block_size
        self.kv_spec = kv_spec
        shape = (num_blocks, num_layers, *kv_spec.layer_shape(block_size))
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the storage."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Of the storage."""
        return self.data.device

    @property
    def address(self) -> int:
        """Address of the first byte, constant for the life of the pool."""
        return self.data.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.data.numel() * self.data.element_size()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers, contiguous at address + block_id * block_bytes."""
        return self.nbytes // self.num_blocks

    def layer(self, index: int) -> torch.Tensor:
        """Return the view [num_blocks, ...] of one layer (strided)."""
        return self.data[:, index]

    def copy_out(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a host copy [n, num_layers, ...] of the blocks."""
        return take_blocks(self.data, self._indices(block_ids)).cpu()

    def copy_in(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Restore what `copy_out` returned into (possibly other) blocks, in the same order."""
        assert blocks.shape[0] == len(block_ids)
        assert blocks.dtype == self.dtype
        target, source = self.data, blocks.to(self.device)
        if self.dtype.itemsize == 1:  # not every device indexes e4m3
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        target[self._indices(block_ids)] = source

    def is_done(self, blocks: torch.Tensor) -> bool:
        """`copy_out` returns when it has read all that it copies."""
        return True

    def discard(self, blocks: torch.Tensor) -> None:
        """A copy holds nothing but its own memory."""

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
