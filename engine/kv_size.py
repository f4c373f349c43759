"""How many KV blocks a rank gets: what the configuration says, or what its GPU has room for.

The measuring half of `engine.memory.kv_budget`: over a pool of two blocks the largest step is run
and the captured steps are sized; what then is in use stays in use. Takes some seconds, and every
rank of the instance takes part, because steps are made together.
"""

import gc
from collections.abc import Callable
from functools import partial

import torch

from engine.build import build_kv_pool
from engine.graphs.graph_budget import measure_graph_bytes
from engine.layers.attention_rule import AttentionRule
from engine.memory.kv_budget import MemorySums, check_num_blocks
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import ProcessGroups
from engine.rehearsal import absorbed_prefill, largest_decode, largest_prefill, rehearse
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.config import DecodeSection, PrefillSection
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


def choose_num_blocks(
    section: PrefillSection | DecodeSection,
    model: DeepseekV3ForCausalLM,
    *,
    max_model_len: int,
    kv_dtype: torch.dtype | None,
) -> int:
    """Return the blocks of the pool, the dummy block included; the same on all ranks.

    Args:
        section: of the role; 0 blocks ask for as many as fit, on a GPU.
        model: loaded, with all that it allocates at first use.
        max_model_len: most tokens of a request.
        kv_dtype: of the pool; None for the model's.

    Raises:
        ConfigError: not one request of `max_model_len` tokens fits.
    """
    if section.num_blocks:
        return section.num_blocks
    sums = _measure(section, model, max_model_len, kv_dtype)
    num_blocks = agree_on_least(model.groups, sums.num_blocks)
    logger.info("measured the device %s: %s", fields(num_blocks=num_blocks), sums)
    return check_num_blocks(
        "prefill" if isinstance(section, PrefillSection) else "decode",
        num_blocks,
        sums,
        block_size=section.block_size,
        max_model_len=max_model_len,
    )


def agree_on_least(groups: ProcessGroups, value: int) -> int:
    """Return the least of the ranks' values; all ranks call."""
    group = groups.tp_group if groups.dims.tp > 1 else groups.ep_group
    return int(group.all_gather(torch.tensor([value], dtype=torch.int64)).min())


def largest_step(
    section: PrefillSection | DecodeSection, max_model_len: int
) -> list[ScheduledRequest]:
    """Return the largest step that a rank of this role can be given."""
    if isinstance(section, DecodeSection):
        return largest_decode(
            max_num_seqs=section.max_num_seqs,
            max_model_len=max_model_len,
            block_size=section.block_size,
        )
    return largest_prefill(
        max_num_tokens=section.max_num_batched_tokens,
        max_num_seqs=section.max_num_seqs,
        max_model_len=max_model_len,
        block_size=section.block_size,
    )


def largest_steps(
    section: PrefillSection | DecodeSection, rule: AttentionRule, max_model_len: int
) -> list[list[ScheduledRequest]]:
    """Return the steps of a rank of this role of which one takes the most memory.

    Args:
        section: of the role.
        rule: of the model's attention, whose forms take memory in different steps.
        max_model_len: most tokens of a request.
    """
    largest = largest_step(section, max_model_len)
    if isinstance(section, DecodeSection):
        return [largest]
    absorbed = absorbed_prefill(
        rule,
        max_num_tokens=section.max_num_batched_tokens,
        max_num_seqs=section.max_num_seqs,
        max_model_len=max_model_len,
        block_size=section.block_size,
    )
    return [absorbed, largest]


def _measure(
    section: PrefillSection | DecodeSection,
    model: DeepseekV3ForCausalLM,
    max_model_len: int,
    kv_dtype: torch.dtype | None,
) -> MemorySums:
    pool = build_kv_pool(model, 2, block_size=section.block_size, dtype=kv_dtype)
    runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    follows = model.groups.dims.tp_rank > 0
    steps = [
        partial(rehearse, runner, scheduled, follows=follows)
        for scheduled in largest_steps(section, model.attention_rule, max_model_len)
    ]
    activations = max(_peak_bytes(model.device, step) for step in steps)
    graphs = 0
    if isinstance(section, DecodeSection) and section.wants_graphs:
        graphs = _graph_bytes(section, model, max_model_len, kv_dtype)
    block_bytes = pool.block_bytes
    del steps, runner, pool
    # Last: libraries have allocated by now what they allocate at first use, and keep.
    free, total = _memory(model.device)
    return MemorySums(
        total=total,
        used=total - free,
        graphs=graphs,
        activations=activations,
        block_bytes=block_bytes,
        fraction=section.gpu_memory_fraction,
    )


def _graph_bytes(
    section: DecodeSection,
    model: DeepseekV3ForCausalLM,
    max_model_len: int,
    kv_dtype: torch.dtype | None,
) -> int:
    try:
        return measure_graph_bytes(
            model,
            max_num_seqs=section.max_num_seqs,
            max_model_len=max_model_len,
            block_size=section.block_size,
            kv_dtype=kv_dtype,
        )
    except RuntimeError as error:
        # Capturing for good will fail alike, and says whether that is allowed.
        logger.warning("steps cannot be captured %s", fields(reason=error))
        return 0


def _peak_bytes(device: torch.device, step: Callable[[], None]) -> int:
    """Return what a step reserves at most, gaps between its tensors included."""
    step()  # libraries allocate at first use, and keep it
    _memory(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _memory(device: torch.device) -> tuple[int, int]:
    """Return free and all bytes of a device, after giving back what is only cached."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)
