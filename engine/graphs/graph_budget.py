"""How much memory the captured steps of a rank will take: asked before the KV pool takes the rest.

It is measured, because nobody can say what libraries allocate: over a pool of a few blocks the
largest size is captured alone, then with another one. The first needs the memory of the
activations, which all sizes share; what the second adds, every further one adds too.
"""

import gc
from collections.abc import Callable, Sequence

import torch

from engine.boot.build import build_kv_pool
from engine.graphs.capture import CapturedSteps
from engine.memory.kv_pool import KVPool
from engine.model.spec import ServedModel

MakeSteps = Callable[[KVPool, tuple[int, ...]], CapturedSteps]
"""Allocates the static buffers of steps of some sizes, ascending, over a pool."""


def measure_graph_bytes(
    model: ServedModel,
    make: MakeSteps,
    sizes: Sequence[int],
    *,
    block_size: int = 64,
    kv_dtype: torch.dtype | None = None,
    variants: Callable[[int], int] = lambda size: 1,
) -> int:
    """Return the device bytes of static buffers and all graphs; nothing is kept.

    Takes some seconds. Ranks that share experts call it together. Other processes on the same
    device disturb it.

    Args:
        model: loaded, on a CUDA device.
        make: the steps of some sizes over a pool.
        sizes: of all steps, ascending.
        block_size: tokens per block.
        kv_dtype: of the KV pool; None for the model's.
        variants: in how many forms a size is captured; smaller ones may have more.

    Raises:
        CaptureError: the model of a rank cannot be captured, which all of them say.
        RuntimeError: of this rank's device.
        PeerLostError: another rank ended.
    """
    pool = build_kv_pool(model, 2, block_size=block_size, dtype=kv_dtype)

    def measure(buckets: tuple[int, ...]) -> int:
        before = _used_bytes(model.device)
        graphs = make(pool, buckets)
        try:
            graphs.capture(group=model.groups.boot_group)
            return _used_bytes(model.device) - before
        finally:
            graphs.close()

    sizes = tuple(sizes)
    measure(sizes[-1:])  # libraries allocate at first use, and keep it
    return extrapolate(measure(sizes[-1:]), measure(probed(sizes, variants)), len(sizes))


def probed(sizes: Sequence[int], variants: Callable[[int], int]) -> tuple[int, ...]:
    """Return the largest size, with that of the others that says what another one adds at most.

    Args:
        sizes: ascending.
        variants: of a size.
    """
    others = sizes[:-1]
    most = max(others, key=lambda size: (variants(size), size), default=None)
    return (*(() if most is None else (most,)), *sizes[-1:])


def extrapolate(of_one: int, of_two: int, count: int) -> int:
    """Return the bytes of `count` sizes from those of the largest and of the two largest."""
    return of_one + (count - 1) * max(of_two - of_one, 0)


def _used_bytes(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free
