"""Absorbed attention of decode steps by FlashMLA, the only place that knows it.

The dense decode kernel of Hopper: one query a sequence, 576 numbers a position, read in place from
pages of 64 through a block table. Pages may be strided, so it takes one layer of the page-major
pool without a copy. In bfloat16, or with latents and queries in e4m3 (all scales 1, accumulation
in float32). The schedule, which splits long sequences over the GPU, depends on the lengths: it is
made by a kernel as well, once a step, so that a replayed graph makes it anew. That kernel is the
library's, or one of ours, which fills the GPU more evenly (`schedule_reference`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from engine.attention.latent_storage import to_storage
from engine.attention.paged_queries import PagedQueries

PAGE, LATENT_DIM, KV_LORA_RANK = 64, 576, 512
"""What the kernel is built for: positions of a page, numbers of a position, and of a value."""

HEADS_PER_PART = 64
"""Heads that one of the GPU's processors attends with."""

OWN_SCHEDULE: Final = True
"""Whether bfloat16 steps take our schedule."""


def is_available() -> bool:
    """Return whether the library is installed and the GPU is a Hopper."""
    return (
        importlib.util.find_spec("flash_mla") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 9
    )


class FlashMLA:
    """The kernel, with the library loaded."""

    def __init__(self, *, own_schedule: bool = OWN_SCHEDULE) -> None:
        """Load the library; `own_schedule` says whose schedule steps in bfloat16 take."""
        library = importlib.import_module("flash_mla")
        interface = importlib.import_module("flash_mla.flash_mla_interface")
        self._run: Callable[..., Any] = library.flash_mla_with_kvcache
        self._plan: Callable[..., Any] = library.get_mla_decoding_metadata
        self._schedule_type: Callable[..., Any] = interface.FlashMLASchedMeta
        # Made here and not in a step: a graph would otherwise capture a copy from the host.
        self._one = torch.ones(1, dtype=torch.float32, device="cuda")
        self._ours = importlib.import_module("engine.kernels.fused.schedule")
        self._own_schedule = own_schedule
        self._num_processors = torch.cuda.get_device_properties("cuda").multi_processor_count

    def takes(self, cache: Tensor) -> bool:
        """Return whether one layer [num_blocks, block_size, L] of a pool suits the kernel."""
        is_known = cache.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        return is_known and cache.shape[1:] == (PAGE, LATENT_DIM)

    def schedule(
        self, seq_lens_S: Tensor, num_heads: int, cache_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return tile metadata and split counts for lengths [S] int32, without a host read."""
        is_bf16 = cache_dtype == torch.bfloat16
        if self._own_schedule and is_bf16 and seq_lens_S.shape[0] <= self._ours.MAX_SEQS:
            num_parts = self._num_processors // -(-num_heads // HEADS_PER_PART)
            tiles, splits = self._ours.schedule(seq_lens_S, max(1, num_parts))
            return tiles, splits
        tiles, splits = self._plan(
            seq_lens_S,
            num_heads,
            1,
            is_fp8_kvcache=cache_dtype == torch.float8_e4m3fn,
            use_legacy=True,
        )
        return tiles, splits

    def paged_attention(
        self,
        q_SHL: Tensor,
        cache: Tensor,
        queries: PagedQueries,
        schedule: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Return [S, H, 512] bfloat16; see `paged_reference`.

        Args:
            q_SHL: [S, H, 576] bfloat16, or in the dtype of `cache`.
            cache: a layer that `takes` says yes to.
            queries: lengths and block tables.
            schedule: of these lengths, H and the dtype of `cache`.
            scale: of the scores.
        """
        is_fp8 = cache.dtype == torch.float8_e4m3fn
        if is_fp8 and q_SHL.dtype != cache.dtype:
            q_SHL = to_storage(q_SHL, cache.dtype)
        tiles, splits = schedule
        holder = self._schedule_type(tile_scheduler_metadata=tiles, num_splits=splits)
        out, _ = self._run(
            q_SHL.unsqueeze(1),
            cache.unsqueeze(2),
            queries.block_tables_SB,
            queries.seq_lens_S,
            KV_LORA_RANK,
            holder,
            softmax_scale=scale,
            causal=False,
            is_fp8_kvcache=is_fp8,
            use_legacy=True,
            descale_q=self._one if is_fp8 else None,
            descale_k=self._one if is_fp8 else None,
        )
        attended: Tensor = out.squeeze(1)
        return attended
