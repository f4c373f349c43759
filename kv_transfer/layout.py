"""How KV blocks lie in memory: page-major, so that a block of all layers is one contiguous run.

``pool[num_blocks, num_layers, num_heads, block_size, head_width]``, with one head where all heads
share what is kept. It is not the pool itself: only sizes and
offsets, which two workers compare at every claim. Layers are adjacent inside a block, so a range
of layers is one run as well.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, fields, replace

from runtime.errors import LayoutMismatchError

_LAYOUT_VERSION = 3


class KVDtype(enum.Enum):
    """Element type of the KV pool; the value is what torch calls it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {KVDtype.FLOAT32: 4, KVDtype.BFLOAT16: 2, KVDtype.FLOAT8_E4M3: 1}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Sizes of a page-major KV pool, without its number of blocks (which may differ between
    peers).
    """

    dtype: KVDtype
    block_size: int
    """Tokens of a block."""
    num_layers: int
    """Layers of the pool, those for multi-token prediction included."""
    num_mtp_layers: int = 0
    """How many of them, the last ones, are for multi-token prediction."""
    num_heads: int = 1
    """Key-value heads that are kept apart, of all ranks of an instance; 1 for a latent."""
    head_width: int
    """Elements of one of them per token and layer: of a latent all, else of key and value."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_layers", "num_heads", "head_width"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"KVLayout.{name} = {value}: must be at least 1")
        if not 0 <= self.num_mtp_layers < self.num_layers:
            raise ValueError(
                f"KVLayout.num_mtp_layers = {self.num_mtp_layers}: must be at least 0, and below "
                f"num_layers = {self.num_layers}"
            )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return self.num_heads * self.block_size * self.head_width * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers; also the stride between blocks."""
        return self.num_layers * self.layer_bytes

    def layer_offset(self, layer: int) -> int:
        """Bytes from a block's start to ``layer``."""
        assert 0 <= layer <= self.num_layers, layer
        return layer * self.layer_bytes

    def of_part(self, num_parts: int) -> KVLayout:
        """The layout of one of ``num_parts`` peers that divide the heads.

        Raises:
            ValueError: they cannot have equally many.
        """
        if self.num_heads % num_parts:
            raise ValueError(f"{self.num_heads} heads cannot be divided over {num_parts} parts")
        return replace(self, num_heads=self.num_heads // num_parts)

    def describe(self) -> str:
        """The canonical text of this layout: what ``fingerprint`` hashes and ``parse`` reads."""
        return (
            f"version={_LAYOUT_VERSION} order=block,layer,head,token dtype={self.dtype.value} "
            f"block_size={self.block_size} num_layers={self.num_layers} "
            f"num_mtp_layers={self.num_mtp_layers} num_heads={self.num_heads} "
            f"head_width={self.head_width}"
        )

    def fingerprint(self) -> str:
        """32 hex digits; equal exactly where two layouts are byte-compatible."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).hexdigest()

    @classmethod
    def parse(cls, description: str) -> KVLayout:
        """The layout that ``describe`` wrote.

        Raises:
            LayoutMismatchError: the text is of another version or is no description.
        """
        values = dict(item.partition("=")[::2] for item in description.split())
        try:
            layout = cls(
                dtype=KVDtype(values["dtype"]),
                block_size=int(values["block_size"]),
                num_layers=int(values["num_layers"]),
                num_mtp_layers=int(values["num_mtp_layers"]),
                num_heads=int(values["num_heads"]),
                head_width=int(values["head_width"]),
            )
        except (KeyError, ValueError) as error:
            raise LayoutMismatchError(f"not a KV layout that we know: {description!r}") from error
        if layout.describe() != description:
            raise LayoutMismatchError(
                f"KV layout of another version: {description!r}, ours is {layout.describe()!r}"
            )
        return layout

    def difference(self, other: KVLayout) -> str:
        """Each field that differs with both values (``"block_size: ours 64, theirs 32"``); "" where
        none does.
        """
        parts = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                parts.append(f"{field.name}: ours {_show(ours)}, theirs {_show(theirs)}")
        return "; ".join(parts)


def _show(value: object) -> str:
    return value.value if isinstance(value, KVDtype) else str(value)


def check_same_layout(ours: KVLayout, fingerprint: str, description: str) -> None:
    """Refuse a peer whose layout is not ours, as decode does at every claim.

    Raises:
        LayoutMismatchError: names each differing field with both sides' values.
    """
    if fingerprint == ours.fingerprint():
        return
    difference = ours.difference(KVLayout.parse(description))
    raise LayoutMismatchError(
        f"KV layouts differ ({difference or 'fingerprints only: ' + fingerprint}). "
        "Fix: the same model, kv_dtype, block_size and decode.num_speculative_tokens in the "
        "configurations of both workers"
    )
