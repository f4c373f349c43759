"""Captured steps of prefill of one kind, for tests of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.graphs.chunk_graphs import ChunkGraphs
from engine.graphs.prompt_inputs import PromptInputs
from engine.graphs.suffix_inputs import SuffixInputs
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM


def suffix_graphs(
    model: DeepseekV3ForCausalLM,
    pool: KVPool,
    sizes: Sequence[int],
    *,
    max_num_seqs: int,
    max_model_len: int,
    **more: Any,
) -> ChunkGraphs:
    """Return steps of suffixes of some sizes, not captured yet; `more` as `ChunkGraphs` has it."""
    inputs = SuffixInputs(
        model.attention_rule,
        sizes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=pool.block_size,
        device=pool.device,
    )
    return ChunkGraphs(model, pool, [inputs], **more)


def prompt_graphs(
    model: DeepseekV3ForCausalLM,
    pool: KVPool,
    sizes: Sequence[int],
    *,
    max_num_seqs: int,
    max_num_cached: int = 0,
    **more: Any,
) -> ChunkGraphs:
    """Return steps of prompts of some sizes, as `suffix_graphs` does."""
    inputs = PromptInputs(
        model.attention_rule,
        sizes,
        max_num_cached=max_num_cached,
        max_num_seqs=max_num_seqs,
        block_size=pool.block_size,
        device=pool.device,
    )
    return ChunkGraphs(model, pool, [inputs], **more)
