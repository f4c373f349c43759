"""How many KV blocks fit beside everything else on a GPU: arithmetic, nothing is measured here.

A worker may take a share of the device. From that share goes what is in use before the pool exists
(weights, registered buffers, libraries, other processes), what captured steps will take, and what
the largest step needs for a moment; the rest is KV. The ranks of an instance have as many blocks as
the one with the least room, because one of them decides for all, or all are asked alike.
"""

from dataclasses import dataclass

from engine.options import EngineOptions
from runtime.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySums:
    """The memory of one device, in bytes, before its KV pool is allocated.

    Attributes:
        total: of the device.
        used: now, by everything and everybody.
        graphs: that captured steps will take.
        activations: that the largest step needs.
        block_bytes: of one block of all layers.
        fraction: of `total` that may be taken, in (0, 1].
    """

    total: int
    used: int
    graphs: int
    activations: int
    block_bytes: int
    fraction: float

    @property
    def room(self) -> int:
        """Bytes that are left for KV; negative where the rest is too much already."""
        return int(self.total * self.fraction) - self.used - self.graphs - self.activations

    @property
    def num_blocks(self) -> int:
        """Whole blocks in that room, at least 0."""
        return max(self.room, 0) // self.block_bytes

    def __str__(self) -> str:
        """Every term, in GiB."""
        terms = {
            "device": self.total,
            "used": self.used,
            "graphs": self.graphs,
            "activations": self.activations,
            "left": self.room,
        }
        sums = " ".join(f"{name}={size / _GIB:.2f}" for name, size in terms.items())
        return f"{sums} GiB fraction={self.fraction:g} block_bytes={self.block_bytes}"


def check_num_blocks(
    options: EngineOptions, num_blocks: int, sums: MemorySums, *, max_model_len: int
) -> int:
    """Return `num_blocks`, of the rank with the least room, if the longest request fits.

    Args:
        options: of the engine, which ask for 0 blocks.
        num_blocks: the dummy block included.
        sums: of this rank, for the message.
        max_model_len: most tokens of a request.

    Raises:
        ConfigError: it does not fit; with the sums.
    """
    needed = 1 + -(-max_model_len // options.kv.block_size)
    if num_blocks >= needed:
        return num_blocks
    problem = (
        f"a request of {max_model_len} tokens needs {needed} blocks, and {num_blocks} fit on the "
        f"rank with the least room (here: {sums})"
    )
    raise ConfigError(
        options.named("num_blocks"),
        0,
        problem,
        f"a smaller model.max_model_len or {options.named(options.token_bound[0])}, more ranks, or "
        f"a larger {options.named('gpu_memory_fraction')}",
    )
