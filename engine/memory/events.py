"""What a prefix cache tells about itself, so that an index elsewhere can follow its content."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block became findable under this hash."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The block of this hash was evicted."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was emptied; every earlier `BlockStored` is void."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
