"""Captured steps of prefill of one kind, for tests of that kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from engine.batch import ForwardBatch
from engine.execution import Execution
from engine.graphs.chunk_graphs import ChunkGraphs
from engine.graphs.prompt_inputs import PromptInputs
from engine.graphs.suffix_inputs import SuffixInputs
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.row_formats import ExpertShare, PlainRows
from tests.engine.parallel.counting_dispatcher import CountingDispatcher
from tests.engine.parallel.thread_ranks import Meetings, ThreadGroup

NUM_RANKS, NUM_EXPERTS = 2, 8


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


def run_step(graphs: ChunkGraphs, batch: ForwardBatch) -> Tensor:
    """Run a step that is of one of the captured kinds."""
    kind = graphs.kind_of(batch)
    assert kind is not None
    return graphs.run(batch, kind)


def run_rank(
    rank: int,
    meetings: Meetings,
    *,
    build: Callable[..., DeepseekV3ForCausalLM],
    capture: Callable[[DeepseekV3ForCausalLM], tuple[ChunkGraphs, KVPool]],
    batch: ForwardBatch,
) -> tuple[Tensor, Tensor, int]:
    """Run a step on one of `NUM_RANKS` ranks that share heads, rows, and experts.

    Returns:
        Hidden states, the pool without its dummy block, and rows that went to experts.
    """
    group = ThreadGroup(rank=rank, size=NUM_RANKS, meetings=meetings)
    dims = ParallelDims(tp=NUM_RANKS, ep=NUM_RANKS, rank=rank)
    groups = ProcessGroups(dims=dims, tp_group=group, ep_group=group)
    num_local = NUM_EXPERTS // NUM_RANKS
    share = ExpertShare(first=rank * num_local, num_local=num_local, num_ranks=NUM_RANKS)
    counting = CountingDispatcher(GatheredDispatcher(PlainRows(share), group))
    execution = Execution(scatter_tokens=True, dispatcher=counting)
    graphs, pool = capture(build(groups=groups, execution=execution))
    counting.num_rows = 0
    return run_step(graphs, batch), pool.data[1:], counting.num_rows
