"""What a booting rank says when its device cannot do what its options ask for.

Each is one line: the field, its value, what is wrong, and a value that would do. What would do is
computed from what was measured; where a measurement turned out to be too small, twice of it is
assumed, because a worker that then boots is worth more than the last block of KV.
"""

import math

from engine.graphs.capture_errors import CaptureError, first_line, is_no_memory, is_of_a_device
from engine.memory.kv_budget import MemorySums
from engine.options import EngineOptions, Switch
from engine.parallel.lost_peer import as_lost_peer
from runtime.errors import ConfigError, PeerLostError

_GIB = 2**30
_LEAST_SHARE = 0.01  # of a device: what measures as nothing may still be what is missing


def refuse_bare_step(options: EngineOptions, what: str, left: int) -> ConfigError:
    """Refuse steps that do not even fit without KV.

    Args:
        options: of the engine.
        what: does not fit.
        left: bytes that weights and buffers leave.
    """
    path, size = _step_size(options)
    problem = f"{what} ran out of the {left / _GIB:.2f} GiB that the weights leave, without any KV"
    return ConfigError(path, size, problem, f"{_half(options, size)}, or more ranks")


def refuse_blocks(options: EngineOptions, fitting: int, sums: MemorySums) -> ConfigError:
    """Refuse more blocks than fit, which every rank does alike.

    Args:
        options: of the engine, with more blocks than that.
        fitting: on the rank with the least room.
        sums: of this rank, for the message.
    """
    problem = f"{fitting} fit on the rank with the least room (here: {sums})"
    path = options.named("num_blocks")
    if fitting < 2:
        size_path, size = _step_size(options)
        fix = f"0, and more ranks, or a {size_path} below {size}"
        return ConfigError(path, options.kv.num_blocks, problem, fix)
    return ConfigError(path, options.kv.num_blocks, problem, _or_all(fitting))


def refuse_for_room(
    options: EngineOptions, what: str, measured: int, sums: MemorySums | None
) -> ConfigError:
    """Refuse a KV pool beside which something else did not fit.

    Args:
        options: of the engine.
        what: did not fit.
        measured: bytes that it was thought to take.
        sums: of the device; None where nothing was measured, because the pool takes less than half
            of what was free.
    """
    path, asked = options.named("num_blocks"), options.kv.num_blocks
    size_path, size = _step_size(options)
    smaller = ConfigError(
        size_path,
        size,
        f"{what} did not fit beside the KV pool",
        f"{_half(options, size)}, fewer {path}, or more ranks",
    )
    if sums is None:
        return smaller
    more = max(measured, int(_LEAST_SHARE * sums.total))
    problem = f"{what} took more than the {measured / _GIB:.2f} GiB that were measured ({sums})"
    if asked:
        fewer = asked - math.ceil(more / sums.block_bytes)
        if fewer < 2:
            return smaller
        return ConfigError(path, asked, problem, _or_all(fewer))
    fraction = options.kv.gpu_memory_fraction
    lower = math.floor(100 * (fraction - more / sums.total)) / 100
    if lower <= 0:
        return smaller
    path = options.named("gpu_memory_fraction")
    return ConfigError(path, fraction, problem, f"{lower:g} or less")


def refuse_capture(
    options: EngineOptions, error: RuntimeError, sums: MemorySums | None, *, in_group: bool
) -> ConfigError | PeerLostError | None:
    """Return what a failed capture is called; None where the error is no device's.

    Args:
        options: ask for graphs, by "on" or "auto".
        error: that the capture ended with. A `CaptureError` is refused too: whether graphs may be
            missing is for the caller to say.
        sums: see `refuse_for_room`; None also where there is no KV pool yet.
        in_group: whether other ranks took part.
    """
    path, asked = options.named("cuda_graphs"), str(options.steps.cuda_graphs)
    if isinstance(error, CaptureError):
        return ConfigError(path, asked, str(error), '"off"')
    if is_no_memory(error):
        measured = 0 if sums is None else sums.graphs
        return refuse_for_room(options, "the captured steps", measured, sums)
    lost = as_lost_peer(error) if in_group else None
    if lost is not None or not is_of_a_device(error):
        return lost
    problem = f"the device failed while steps were captured: {first_line(error)}"
    return ConfigError(path, asked, problem, '"off"')


def _or_all(num_blocks: int) -> str:
    return f"{num_blocks} or less, or 0 for as many as fit"


def _half(options: EngineOptions, size: int) -> str:
    """Return what takes about half of a step's memory, or less."""
    steps = options.steps
    less = f"{max(size // 2, 1)} or less"
    if steps.max_masked_tokens is Switch.AUTO or not steps.max_masked_tokens:
        return less
    path = options.named("max_masked_tokens")  # each expert has room for each of these
    return f"{less}, or a {path} below {steps.max_masked_tokens}"


def _step_size(options: EngineOptions) -> tuple[str, int]:
    """Return what bounds the largest step."""
    field, size = options.token_bound
    return options.named(field), size
