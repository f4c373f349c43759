"""How many KV blocks a rank gets: what its options say, or what its GPU has room for.

The measuring half of `engine.memory.kv_budget`: over a pool of two blocks the largest step is run
and the captured steps are sized; what then is in use stays in use. Takes some seconds, and every
rank of the instance takes part, because steps are made together. A number of blocks in the
options is measured too where it takes most of the memory: it is refused here, by all ranks
alike and with a number that fits, and not where one rank runs out of memory in a step of all.
"""

import gc
from collections.abc import Callable
from functools import partial

import torch

from engine.boot.build import build_kv_pool
from engine.boot.captured import steps_to_capture
from engine.boot.make_runner import make_runner
from engine.boot.refusals import refuse_bare_step, refuse_blocks, refuse_capture
from engine.boot.rehearsal import largest_steps, rehearse
from engine.graphs.capture_errors import CaptureError, is_no_memory
from engine.graphs.graph_budget import measure_graph_bytes
from engine.memory.kv_budget import MemorySums, check_num_blocks
from engine.model.spec import ServedModel
from engine.options import EngineOptions, Switch
from engine.parallel.groups import ProcessGroups
from engine.streams import Streams
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


def measure_memory(
    options: EngineOptions,
    model: ServedModel,
    *,
    max_model_len: int,
    streams: Streams,
    max_masked_tokens: int = 0,
) -> MemorySums | None:
    """Measure what a rank's device holds before its KV pool; all ranks call.

    Args:
        options: of the engine.
        model: loaded, with all that it allocates at first use.
        max_model_len: most tokens of a request.
        streams: of the rank, which keep what libraries hold for each.
        max_masked_tokens: see `engine.execution.Execution`.

    Returns:
        None where nobody has to know: on a CPU, and where the blocks that are asked for take less
        than half of what is free, on every rank.

    Raises:
        ConfigError: steps do not even fit without KV, or cannot be captured as they are to be.
        PeerLostError: another rank ended.
    """
    kv = options.kv
    if options.device == "cpu":
        return None
    if kv.num_blocks:
        pool = build_kv_pool(model, 2, block_size=kv.block_size, dtype=kv.dtype)
        free, _ = _memory(model.device)
        is_roomy = 2 * kv.num_blocks * pool.block_bytes < free
        del pool
        if agree_on_least(model.groups, int(is_roomy)):
            return None
    try:
        return _measure(options, model, max_model_len, max_masked_tokens, streams)
    except torch.OutOfMemoryError as error:
        free, _ = _memory(model.device)
        raise refuse_bare_step(options, "the largest step", free) from error


def choose_num_blocks(
    options: EngineOptions,
    groups: ProcessGroups,
    sums: MemorySums | None,
    *,
    max_model_len: int,
) -> int:
    """Return the blocks of the pool, the dummy block included; the same on all ranks.

    Args:
        options: of the engine; 0 blocks ask for as many as fit, on a GPU.
        groups: the ranks, all of which call.
        sums: of `measure_memory`.
        max_model_len: most tokens of a request.

    Raises:
        ConfigError: not one request of `max_model_len` tokens fits, or not as many blocks as the
            options say.
    """
    asked = options.kv.num_blocks
    if sums is None:
        return asked
    fitting = agree_on_least(groups, sums.num_blocks)
    logger.info("measured the device %s: %s", fields(num_blocks=fitting), sums)
    if asked:
        if asked > fitting:
            raise refuse_blocks(options, fitting, sums)
        return asked
    return check_num_blocks(options, fitting, sums, max_model_len=max_model_len)


def agree_on_least(groups: ProcessGroups, value: int) -> int:
    """Return the least of the ranks' values; all ranks call."""
    group = groups.tp_group if groups.dims.tp > 1 else groups.ep_group
    return int(group.all_gather(torch.tensor([value], dtype=torch.int64)).min())


def _measure(
    options: EngineOptions,
    model: ServedModel,
    max_model_len: int,
    max_masked_tokens: int,
    streams: Streams,
) -> MemorySums:
    kv = options.kv
    pool = build_kv_pool(model, 2, block_size=kv.block_size, dtype=kv.dtype)
    runner = make_runner(model, pool, options)
    follows = model.groups.dims.tp_rank > 0
    steps = [
        partial(rehearse, runner, scheduled, follows=follows)
        for scheduled in largest_steps(
            options, model.attention_rule, max_model_len, max_masked_tokens
        )
    ]
    activations = max(_peak_bytes(model.device, step) for step in steps)
    graphs = 0
    if options.wants_graphs:
        graphs = _graph_bytes(options, model, max_model_len, streams)
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
        fraction=1.0 if kv.num_blocks else kv.gpu_memory_fraction,
    )


def _graph_bytes(
    options: EngineOptions, model: ServedModel, max_model_len: int, streams: Streams
) -> int:
    """Return the bytes of the captured steps; 0 where all ranks agree that none can be captured."""
    steps = steps_to_capture(options, model, max_model_len, streams)
    if not steps.sizes:
        return 0
    try:
        return measure_graph_bytes(
            model,
            steps.make,
            steps.sizes,
            block_size=options.kv.block_size,
            kv_dtype=options.kv.dtype,
            variants=steps.variants,
        )
    except CaptureError as error:
        if options.steps.cuda_graphs is Switch.ON:
            path = options.named("cuda_graphs")
            raise ConfigError(path, "on", str(error), '"off"') from error
        logger.warning("steps cannot be captured %s", fields(reason=error))
        return 0
    except RuntimeError as error:
        if is_no_memory(error):
            free, _ = _memory(model.device)
            raise refuse_bare_step(options, "the captured steps", free) from error
        in_group = model.groups.boot_group.size > 1
        refusal = refuse_capture(options, error, None, in_group=in_group)
        if refusal is None:
            raise
        raise refusal from error


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
