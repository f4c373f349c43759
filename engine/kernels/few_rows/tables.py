"""Which products of few rows are cut how, as JSON: what was measured on one kind of GPU.

An entry names one weight's shape, a number of rows, the fastest cut, and what it and DeepGEMM took.
The table takes a product only where it was measured to be faster; what was never measured is left
alone, and so is everything on a GPU that has no table.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.kernels.few_rows.cuts import Cut
from engine.kernels.triton_gemm.tables import file_name
from runtime.errors import ConfigError

FOLDER: Final = Path(__file__).with_name("configs")

MIN_GAIN: Final = 1.03
"""DeepGEMM's time over ours from which on ours is used: less is within the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutEntry:
    """What was measured of one product.

    Attributes:
        num_rows: M.
        num_columns: N.
        depth: K.
        cut: the fastest one.
        microseconds: of the cut, in a graph, the weight read from memory.
        deep_gemm_microseconds: of DeepGEMM, likewise.
    """

    num_rows: int
    num_columns: int
    depth: int
    cut: Cut
    microseconds: float
    deep_gemm_microseconds: float

    @property
    def is_faster(self) -> bool:
        """Whether the cut is worth using."""
        return self.deep_gemm_microseconds >= MIN_GAIN * self.microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTable:
    """Measured on one kind of device, by its name as CUDA tells it."""

    device: str
    entries: tuple[CutEntry, ...] = ()

    def choose(self, num_rows: int, num_columns: int, depth: int) -> Cut | None:
        """Return the cut of the least measured number of rows that is not less; None for none."""
        fitting = [
            entry
            for entry in self.entries
            if (entry.num_columns, entry.depth) == (num_columns, depth)
            and entry.num_rows >= num_rows
        ]
        if not fitting:
            return None
        nearest = min(fitting, key=lambda entry: entry.num_rows)
        return nearest.cut if nearest.is_faster else None


def find_cuts(device: str, folder: Path = FOLDER) -> CutTable | None:
    """Return the device's table.

    Raises:
        ConfigError: the file is there and is not such a table.
    """
    file = folder / file_name(device)
    return read_table(file) if file.is_file() else None


def read_table(file: Path) -> CutTable:
    """Read a table.

    Raises:
        ConfigError: the file cannot be read or is not a table.
    """
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        entries = tuple(
            CutEntry(**{**entry, "cut": Cut(**entry["cut"])}) for entry in fields["entries"]
        )
        return CutTable(device=fields["device"], entries=entries)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "few rows", str(file), f"is no table of cuts ({error!r})", "delete it"
        ) from error


def write_table(file: Path, device: str, entries: Sequence[CutEntry]) -> None:
    """Write a table, one entry a line."""
    lines = ",\n".join("  " + json.dumps(dataclasses.asdict(entry)) for entry in entries)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"device": {json.dumps(device)},\n "entries": [\n{lines}\n ]}}\n', "utf-8")
