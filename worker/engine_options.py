"""What a section of the configuration says to an engine: the one place that knows both.

Workers, measurements and the checks before a start ask here, so that all of them mean the same by
one file. Pure: nothing is opened, measured or allocated.
"""

from __future__ import annotations

from typing import Final, Literal

import torch

from engine.options import (
    ChunkSteps,
    DispatcherKind,
    EngineOptions,
    KVOptions,
    ModelOptions,
    Switch,
    TokenSteps,
)
from engine.parallel.dims import ParallelDims
from runtime.config import ClusterConfig, DecodeSection, PrefillSection

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def engine_options(section: PrefillSection | DecodeSection) -> EngineOptions:
    """Return what a rank of a role is told; its refusals name the fields of the section."""
    num_redundant_experts = 0
    steps: ChunkSteps | TokenSteps
    match section:
        case PrefillSection():
            prefix = "prefill."
            steps = ChunkSteps(
                max_num_batched_tokens=section.max_num_batched_tokens,
                two_batch_overlap=Switch(section.two_batch_overlap),
                scatter_tokens=section.is_scattered,
                cuda_graphs=Switch(section.cuda_graphs),
                max_masked_tokens=_masked_tokens(section.max_masked_tokens),
            )
        case DecodeSection():
            prefix, num_redundant_experts = "decode.", section.num_redundant_experts
            steps = TokenSteps(
                cuda_graphs=Switch(section.cuda_graphs),
                overlap_shared_expert=section.overlap_shared_expert,
                dependent_launches=Switch(section.dependent_launches),
                dispatcher=DispatcherKind(section.dispatcher),
                max_tokens_per_rank=section.max_tokens_per_rank,
                num_speculative_tokens=section.num_speculative_tokens,
            )
    return EngineOptions(
        steps=steps,
        kv=KVOptions(
            num_blocks=section.num_blocks,
            block_size=section.block_size,
            gpu_memory_fraction=section.gpu_memory_fraction,
            dtype=_DTYPES.get(section.kv_dtype),  # none of the name "auto": the model's
        ),
        device=section.device,
        num_threads=section.num_threads,
        max_num_seqs=section.max_num_seqs,
        num_redundant_experts=num_redundant_experts,
        prefix=prefix,
    )


def _masked_tokens(asked: int | str) -> int | Literal[Switch.AUTO]:
    if isinstance(asked, int):
        return asked
    assert asked == Switch.AUTO, asked  # the section has checked it
    return Switch.AUTO


def model_options(config: ClusterConfig) -> ModelOptions:
    """Return which model the workers of a cluster serve.

    Drafts need the layers for multi-token prediction in both roles: prefill computes their KV of
    the prompt.
    """
    return ModelOptions(
        path=config.model.path,
        load_format=config.model.load_format,
        dtype=_DTYPES[config.compute_dtype],
        max_model_len=config.model.max_model_len,
        with_mtp=config.decode.num_speculative_tokens > 0,
    )


def parallel_dims(section: PrefillSection | DecodeSection, rank: int = 0) -> ParallelDims:
    """Return how the workers of a role are parallel, seen from one of their ranks."""
    match section:
        case PrefillSection():
            ep = section.num_ranks if section.expert_parallel else 1
            return ParallelDims(tp=section.tp, dp=section.dp, ep=ep, rank=rank)
        case DecodeSection():
            return ParallelDims(dp=section.dp, ep=section.dp, rank=rank)
