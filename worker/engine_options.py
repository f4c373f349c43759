"""What a section of the configuration says to an engine: the one place that knows both.

Workers, measurements and the checks before a start ask here, so that all of them mean the same by
one file. Pure, but for `recorded_load`: nothing is opened, measured or allocated.
"""

from __future__ import annotations

from pathlib import Path
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
    TPExchangeKind,
)
from engine.parallel.dims import ParallelDims
from experts.static_start import RecordedLoad, read_recorded_load
from runtime.config import ClusterConfig, DecodeSection, PrefillSection

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}


def engine_options(section: PrefillSection | DecodeSection) -> EngineOptions:
    """Return what a rank of a role is told; its refusals name the fields of the section."""
    steps: ChunkSteps | TokenSteps
    sizes = section.sizes
    match section:
        case PrefillSection():
            prefix = "prefill."
            steps = ChunkSteps(
                max_num_batched_tokens=sizes.max_num_batched_tokens,
                two_batch_overlap=Switch(section.two_batch_overlap),
                scatter_tokens=section.is_scattered,
                cuda_graphs=Switch(section.cuda_graphs),
                max_masked_tokens=_or_auto(section.max_masked_tokens),
                overlap_shared_expert=section.overlap_shared_expert,
                dependent_launches=Switch(section.dependent_launches),
                tp_exchange=TPExchangeKind(section.tp_exchange),
            )
        case DecodeSection():
            prefix = "decode."
            steps = TokenSteps(
                cuda_graphs=Switch(section.cuda_graphs),
                overlap_shared_expert=section.overlap_shared_expert,
                dependent_launches=Switch(section.dependent_launches),
                dispatcher=DispatcherKind(section.dispatcher),
                max_tokens_per_rank=section.tokens_per_rank,
                num_speculative_tokens=_or_auto(section.num_speculative_tokens),
                record_waits=Switch(section.record_waits),
            )
    return EngineOptions(
        steps=steps,
        kv=KVOptions(
            num_blocks=sizes.num_blocks,
            block_size=section.block_size,
            gpu_memory_fraction=section.gpu_memory_fraction,
            dtype=_DTYPES.get(section.kv_dtype),  # none of the name "auto": the model's
        ),
        device=section.device,
        num_threads=section.num_threads,
        max_num_seqs=sizes.max_num_seqs,
        num_redundant_experts=section.num_redundant_experts,
        rebalance_experts=Switch(section.rebalance_experts),
        rebalance_host_gib=section.rebalance_host_gib,
        prefix=prefix,
    )


def recorded_load(config: ClusterConfig, role: str) -> RecordedLoad | None:
    """Read what the experts of a role got, if the configuration names a recording.

    Raises:
        ConfigError: it cannot be read, or is of another role or model.
    """
    section = config.prefill if role == "prefill" else config.decode
    load = read_recorded_load(section.expert_load, f"{role}.expert_load")
    if load is not None:
        load.check(role=role, model_name=config.model.name or Path(config.model.path).name)
    return load


def _or_auto(asked: int | str) -> int | Literal[Switch.AUTO]:
    if isinstance(asked, int):
        return asked
    assert asked == Switch.AUTO, asked  # checked by the section, or decided by worker.auto_drafts
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
        with_mtp=config.decode.has_drafts,
    )


def parallel_dims(section: PrefillSection | DecodeSection, rank: int = 0) -> ParallelDims:
    """Return how the workers of a role are parallel, seen from one of their ranks."""
    match section:
        case PrefillSection():
            ep = section.num_ranks if section.expert_parallel else 1
            return ParallelDims(tp=section.tp, dp=section.dp, ep=ep, rank=rank)
        case DecodeSection():
            return ParallelDims(dp=section.dp, ep=section.dp, rank=rank)
