"""Pools of KV blocks with random content, on the host or on a GPU, and their checksums.

A checksum of a block is the sum of its 64-bit words, each times an odd number that depends on its
place, modulo 2**64: swapped, missing and stale words change it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.transport import KV_REGION, MemoryRegion

LAYOUT = KVLayout(dtype=KVDtype.BFLOAT16, block_size=64, num_layers=61, head_width=576)
BLOCKS_PER_PROMPT = 64
PROMPT_BYTES = BLOCKS_PER_PROMPT * LAYOUT.block_bytes
_WORDS = LAYOUT.block_bytes // 8
_POISON = 0x5A


class BlockMemory(Protocol):
    """``num_blocks`` blocks of ``LAYOUT``."""

    num_blocks: int

    def region(self) -> MemoryRegion:
        """For the transport; block 0 is scratch, as in the workers."""
        ...

    def fill_random(self, seed: int) -> None:
        """Random words everywhere."""
        ...

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks, so that stale content cannot pass for a transfer."""
        ...

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """One number per block."""
        ...


def create_memory(num_blocks: int, device: int | None) -> BlockMemory:
    """On the host (None) or on a CUDA device."""
    return HostMemory(num_blocks) if device is None else CudaMemory(num_blocks, device)


class HostMemory:
    """A numpy array."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._words = np.zeros((num_blocks, _WORDS), dtype=np.uint64)
        self._weights = np.arange(_WORDS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def region(self) -> MemoryRegion:
        """See ``BlockMemory``, as the methods without a comment below."""
        return MemoryRegion(
            KV_REGION,
            self._words.ctypes.data,
            self._words.nbytes,
            scratch_bytes=LAYOUT.block_bytes,
        )

    def fill_random(self, seed: int) -> None:
        """See ``BlockMemory``."""
        generator = np.random.default_rng(seed)
        for block in self._words:
            block[:] = generator.integers(0, 2**64, _WORDS, dtype=np.uint64)

    def poison(self, block_ids: Sequence[int]) -> None:
        """See ``BlockMemory``."""
        for block in block_ids:
            self._words[block].view(np.uint8).fill(_POISON)

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """See ``BlockMemory``."""
        return [int(np.dot(self._words[block], self._weights)) for block in block_ids]

    def copy_from(
        self, source: HostMemory, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        """The plain copy."""
        for src, dst in zip(src_block_ids, dst_block_ids, strict=True):
            np.copyto(self._words[dst], source._words[src])


class CudaMemory:
    """A torch tensor on one GPU."""

    def __init__(self, num_blocks: int, device: int) -> None:
        import torch

        self._torch = torch
        self.num_blocks = num_blocks
        self._device = device
        torch.cuda.set_device(device)
        self._words = torch.zeros((num_blocks, _WORDS), dtype=torch.int64, device="cuda")
        self._weights = torch.arange(_WORDS, dtype=torch.int64, device="cuda") * 2 + 1

    def region(self) -> MemoryRegion:
        """See ``BlockMemory``, as the methods without a comment below."""
        return MemoryRegion(
            KV_REGION,
            self._words.data_ptr(),
            self._words.nbytes,
            device=self._device,
            scratch_bytes=LAYOUT.block_bytes,
        )

    def fill_random(self, seed: int) -> None:
        """See ``BlockMemory``."""
        self._torch.manual_seed(seed)
        for block in self._words:
            block.random_(-(2**63), None)
        self._torch.cuda.synchronize()

    def poison(self, block_ids: Sequence[int]) -> None:
        """See ``BlockMemory``."""
        self._torch.cuda.set_device(self._device)
        self._words[list(block_ids)] = int.from_bytes(bytes([_POISON]) * 8, "little")
        self._torch.cuda.synchronize()

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """See ``BlockMemory``."""
        sums = [(self._words[block] * self._weights).sum() for block in block_ids]
        return [int(value) % 2**64 for value in self._torch.stack(sums).tolist()]

    def enable_peer_access(self, source: CudaMemory) -> None:
        """Let the two devices reach each other, as torch does at the first copy."""
        self._words[0].copy_(source._words[0])
        source._words[0].copy_(self._words[0])

    def copy_from(
        self, source: CudaMemory, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        """The plain copy between two GPUs, one asynchronous driver call a block; returns when it is
        complete.
        """
        driver = ctypes.CDLL("libcuda.so.1")
        self._torch.cuda.set_device(source._device)
        stream = ctypes.c_void_p(self._torch.cuda.current_stream().cuda_stream)
        base_src, base_dst = source._words.data_ptr(), self._words.data_ptr()
        for src, dst in zip(src_block_ids, dst_block_ids, strict=True):
            status = driver.cuMemcpyDtoDAsync_v2(
                ctypes.c_uint64(base_dst + dst * LAYOUT.block_bytes),
                ctypes.c_uint64(base_src + src * LAYOUT.block_bytes),
                ctypes.c_size_t(LAYOUT.block_bytes),
                stream,
            )
            assert status == 0, f"CUDA driver error {status}"
        self._torch.cuda.synchronize()


def measure_plain_copy(devices: tuple[int | None, int | None], *, repeat: int) -> list[float]:
    """Bytes per second of copying one prompt, block by block between random places, ``repeat``
    times. The bound: what this memory does when one thread has nothing else to do.
    """
    generator = np.random.default_rng(1)
    num_blocks = 2 * BLOCKS_PER_PROMPT
    source, target = create_memory(num_blocks, devices[0]), create_memory(num_blocks, devices[1])
    source.fill_random(3)
    target.poison(range(num_blocks))
    if isinstance(source, CudaMemory) and isinstance(target, CudaMemory):
        target.enable_peer_access(source)
    rates = []
    for _ in range(repeat):
        src, dst = (generator.permutation(num_blocks)[:BLOCKS_PER_PROMPT].tolist() for _ in "ab")
        began = time.perf_counter()
        target.copy_from(source, src, dst)  # type: ignore[attr-defined]
        rates.append(PROMPT_BYTES / (time.perf_counter() - began))
    return rates
