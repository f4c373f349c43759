"""Absorbed attention by FlashMLA, the only place that knows it.

The dense decode kernel of Hopper: equally many queries a sequence (one in decode, some in short
suffixes), 576 numbers a position, read in place from pages of 64 through a block table. Pages may
be strided, so it takes one layer of the page-major pool without a copy. In bfloat16, or with
latents and queries in e4m3 (all scales 1, accumulation in float32). The schedule, which splits long
sequences over the GPU, depends on the lengths: it is made by a kernel as well, once a step, so that
a replayed graph makes it anew. That kernel is the library's, or one of ours, which fills the GPU
more evenly (`schedule_reference`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from engine.attention.latent_storage import to_storage
from engine.attention.paged_queries import PagedQueries
from engine.attention.rectangle import Rectangle

PAGE, LATENT_DIM, KV_LORA_RANK = 64, 576, 512
"""What the kernel is built for: positions of a page, numbers of a position, and of a value."""

HEADS_PER_PART = 64
"""Heads that one of the GPU's processors attends with."""

OWN_SCHEDULE: Final = True
"""Whether bfloat16 steps take our schedule."""

TAKES_SUFFIXES: Final = True
"""Whether it attends for several queries a sequence too, in bfloat16; in e4m3 it would round the
queries, which our kernel does not."""


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

    def takes_queries(self, queries: PagedQueries, cache_dtype: torch.dtype) -> bool:
        """Return whether the sequences have as many queries each, or can be laid out so.

        They can where the host does not know their numbers: such steps are cut for it
        (`engine.graphs.segments`).
        """
        counts = queries.counts
        if counts is None:
            return True
        is_fixed = not counts.lengths and counts.total > 0
        return TAKES_SUFFIXES and cache_dtype == torch.bfloat16 and (is_fixed or counts.are_equal)

    def plan(self, queries: PagedQueries, num_heads: int, cache_dtype: torch.dtype) -> PagedQueries:
        """Return queries that `takes_queries` says yes to, with their schedule."""
        counts, rectangle, num_places = queries.counts, None, queries.most * len(queries.seq_lens_S)
        if counts is not None and not counts.are_equal and counts.total < num_places:
            rectangle = Rectangle.of(counts.cu_seqlens_q, counts.most, counts.total)
        schedule = self.schedule(queries.seq_lens_S, queries.most * num_heads, cache_dtype)
        return replace(queries, schedule=schedule, rectangle=rectangle)

    def schedule(
        self, seq_lens_S: Tensor, num_rows: int, cache_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return tile metadata and split counts for lengths [S] int32, without a host read.

        Args:
            seq_lens_S: positions of each sequence.
            num_rows: of each sequence, heads times queries.
            cache_dtype: of the pool.
        """
        is_bf16 = cache_dtype == torch.bfloat16
        if self._own_schedule and is_bf16 and seq_lens_S.shape[0] <= self._ours.MAX_SEQS:
            num_parts = self._num_processors // -(-num_rows // HEADS_PER_PART)
            tiles, splits = self._ours.schedule(seq_lens_S, max(1, num_parts))
            return tiles, splits
        tiles, splits = self._plan(
            seq_lens_S,
            num_rows,
            1,
            is_fp8_kvcache=cache_dtype == torch.float8_e4m3fn,
            use_legacy=True,
        )
        return tiles, splits

    def paged_attention(
        self,
        q_RHL: Tensor,
        cache: Tensor,
        queries: PagedQueries,
        schedule: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        """Return [R, H, 512] bfloat16; see `paged_reference`.

        Args:
            q_RHL: [R, H, 576] bfloat16, or in the dtype of `cache`; laid out as the rectangle of
                the queries where they have one, so that each sequence has equally many.
            cache: a layer that `takes` says yes to.
            queries: lengths, block tables and counts, of `plan` where there are counts.
            schedule: of these lengths, H and the dtype of `cache`.
            scale: of the scores.
        """
        is_fp8 = cache.dtype == torch.float8_e4m3fn
        if is_fp8 and q_RHL.dtype != cache.dtype:
            q_RHL = to_storage(q_RHL, cache.dtype)
        tiles, splits = schedule
        holder = self._schedule_type(tile_scheduler_metadata=tiles, num_splits=splits)
        out, _ = self._run(
            q_RHL.view(-1, queries.most, *q_RHL.shape[1:]),
            cache.unsqueeze(2),
            queries.block_tables_SB,
            queries.seq_lens_S,
            KV_LORA_RANK,
            holder,
            softmax_scale=scale,
            causal=queries.most > 1,
            is_fp8_kvcache=is_fp8,
            use_legacy=True,
            descale_q=self._one if is_fp8 else None,
            descale_k=self._one if is_fp8 else None,
        )
        attended: Tensor = out.flatten(0, 1)
        return attended
