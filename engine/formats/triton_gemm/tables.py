"""Tiles that were measured to be the fastest on one kind of GPU, as JSON, and the choice of a tile.

A file holds what `tandem bench tune` found on one kind of device. It serves that kind only, and the
compiler's major version that it was made with (`TunedTable.is_of`): within one, a tile that was
the fastest is better than a guess, and no tile is wrong. A shape that was measured at some numbers
of rows is run at any other as at the nearest; what was never measured runs with the best guess.
"""

import dataclasses
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.formats.triton_gemm.candidates import candidates, is_legal
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig
from runtime.errors import ConfigError

VARIABLE: Final = "TANDEM_KERNEL_CONFIGS"
"""Names a folder of such files that is looked into before the package's own."""

PACKAGE_FOLDER: Final = Path(__file__).with_name("configs")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedEntry:
    """The best tile of a shape, and what it reached.

    Attributes:
        microseconds: median of one product.
        tflops: 2 M N K over that time (masked: of the rows that were used).
        deep_gemm_tflops: DeepGEMM's on the same inputs, None where it does not run.
        tried: candidates that were timed, of how many there are.
    """

    shape: ProductShape
    tile: TileConfig
    microseconds: float
    tflops: float
    deep_gemm_tflops: float | None = None
    tried: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTable:
    """What was measured on one kind of device.

    Attributes:
        device: its name, as CUDA tells it.
        sm: see `DeviceLimits`.
        shared_memory: see `DeviceLimits`.
        triton: version of the compiler that measured last; older entries have the same major one.
        entries: one for each shape.
    """

    device: str
    sm: int
    shared_memory: int
    triton: str
    entries: tuple[TunedEntry, ...] = ()

    def is_of(self, triton: str) -> bool:
        """Return whether the table is of use with this version of the compiler."""
        return self.triton.partition(".")[0] == triton.partition(".")[0]

    def with_entries(self, entries: Sequence[TunedEntry]) -> "TunedTable":
        """Return the table with these entries, older ones of the same shapes replaced."""
        merged = {entry.shape: entry for entry in (*self.entries, *entries)}
        return dataclasses.replace(self, entries=tuple(merged.values()))


def choose(shape: ProductShape, table: TunedTable | None, limits: DeviceLimits) -> TileConfig:
    """Return the tile that was measured at the nearest number of rows, else the best guess."""
    measured = []
    if table is not None and table.sm == limits.sm:
        measured = [
            entry
            for entry in table.entries
            if dataclasses.replace(entry.shape, num_rows=shape.num_rows) == shape
            and is_legal(entry.tile, limits)
        ]
    if not measured:
        return candidates(shape, limits)[0]

    def distance(entry: TunedEntry) -> tuple[float, int]:
        rows = entry.shape.num_rows
        return abs(math.log2(rows / max(shape.num_rows, 1))), rows

    return min(measured, key=distance).tile


def file_name(device: str) -> str:
    """Return the name of a device's file."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in device) + ".json"


def find_table(
    device: str, triton: str, folders: Sequence[Path] | None = None
) -> TunedTable | None:
    """Return the first table for this device, from the named folder or the package's own.

    Raises:
        ConfigError: the file is there and is not such a table.
    """
    for folder in _folders() if folders is None else folders:
        file = folder / file_name(device)
        if not file.is_file():
            continue
        table = read_table(file)
        if table.is_of(triton):
            logger.info("tuned tiles file=%s entries=%d", file, len(table.entries))
            return table
        logger.warning(
            "ignored tuned tiles of another compiler file=%s triton=%s running=%s",
            file, table.triton, triton,
        )  # fmt: skip
    return None


def table_to_extend(file: Path, empty: TunedTable) -> TunedTable:
    """Return what new measurements are added to: `empty`, with the entries that serving would use.

    Raises:
        ConfigError: the file is there and is no table.
    """
    if not file.is_file():
        return empty
    old = read_table(file)
    return empty.with_entries(old.entries if old.is_of(empty.triton) else ())


def _folders() -> tuple[Path, ...]:
    named = os.environ.get(VARIABLE)
    return (*((Path(named).expanduser(),) if named else ()), PACKAGE_FOLDER)


def read_table(file: Path) -> TunedTable:
    """Read a table.

    Raises:
        ConfigError: the file cannot be read or is not a table.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        entries = tuple(_read_entry(entry) for entry in fields.pop("entries"))
        return TunedTable(**fields, entries=entries)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            VARIABLE, str(file), f"is no table of tuned tiles ({error!r})",
            "delete it, or write it again: tandem bench tune",
        ) from error  # fmt: skip


def write_table(file: Path, table: TunedTable) -> None:
    """Write a table, one entry a line, in an order that does not depend on when it was measured."""
    fields = dataclasses.asdict(table)
    entries = sorted(fields.pop("entries"), key=lambda entry: tuple(entry["shape"].values()))
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    head = json.dumps(fields, indent=1).removesuffix("\n}")
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    new.replace(file)


def _read_entry(fields: Mapping[str, dict[str, object]]) -> TunedEntry:
    content: dict[str, object] = dict(fields)
    shape, tile = dict(fields["shape"]), fields["tile"]
    shape["layout"] = RowLayout(str(shape["layout"]))
    content["shape"] = ProductShape(**shape)  # type: ignore[arg-type]
    content["tile"] = TileConfig(**tile)  # type: ignore[arg-type]
    content["tried"] = tuple(fields["tried"])
    return TunedEntry(**content)  # type: ignore[arg-type]
