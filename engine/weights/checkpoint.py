"""A checkpoint folder of safetensors files: which tensor is where, and parts of tensors.

Only headers are read on opening. `read` brings one part of one tensor into memory, and undoes FP8:
quantised weights come out as float32. The key idea for FP8: a part that does not begin and end on
block borders is read enlarged to them, dequantised with its scales, and cut.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.hf_config.quantization import SECTION, UNQUANTIZED
from engine.weights.fp8 import dequantize_block
from runtime.errors import InternalError
from runtime.parsing import parse_json

INDEX: Final = "model.safetensors.index.json"
_SCALE_SUFFIX: Final = "_scale_inv"
_FP8: Final = "F8_E4M3"
_PLAIN: Final = ("BF16", "F32", "F16", "F64")
"""Numbers that are the weights themselves; anything else would be converted to wrong ones."""
_SCALES: Final = (*_PLAIN, "F8_E8M0")

Ranges = tuple[tuple[int, int], ...]


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensor and its file.

    Attributes:
        tensor: name of the (first) tensor concerned, or empty if a file is the matter.
        file: the file concerned, or the checkpoint folder.
    """

    def __init__(self, problem: str, *, file: Path, tensor: str = "") -> None:
        where = f"{tensor} in {file}" if tensor else str(file)
        super().__init__(f"{where}: {problem}")
        self.tensor = tensor
        self.file = file


class Checkpoint:
    """An open checkpoint; a context manager that closes its files.

    Raises:
        CheckpointError: no or unreadable files, a file that the index names is absent, or one
            tensor in two files.
    """

    def __init__(self, path: str | Path, *, fp8_block_size: int = 128) -> None:
        self.path = Path(path)
        self._block = fp8_block_size or 128
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        try:
            for file in _list_files(self.path):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        """Yield tensor names in the order of files, scales of FP8 weights left out."""
        return (name for name in self._file_of if not self._is_scale(name))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors, scales of FP8 weights included."""
        return frozenset(self._file_of)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is stored in FP8."""
        dtype: str = self._slice(name).get_dtype()
        return dtype == _FP8

    def is_plain(self, name: str) -> bool:
        """Return whether a tensor is stored as the numbers that it means."""
        return self._slice(name).get_dtype() in _PLAIN

    def read(self, name: str, ranges: Ranges) -> Tensor:
        """Read part of a tensor, one half-open range per dimension.

        Returns:
            The part, on the CPU; FP8 weights as float32, all else as stored.

        Raises:
            CheckpointError: FP8 without scales, scales of another shape, or numbers of a kind that
                weights are not stored in.
        """
        part = self._slice(name)
        if self.is_fp8(name):
            return self._read_fp8(name, ranges)
        self._check_dtype(name, _PLAIN)
        return _cut(part, ranges)

    def read_quantized(self, name: str, ranges: Ranges) -> tuple[Tensor, Tensor]:
        """Read part of a matrix as block FP8.

        Args:
            name: of a matrix.
            ranges: begin on block borders, and end on them or with the matrix.

        Returns:
            e4m3 and scales, on the CPU.

        Raises:
            CheckpointError: not stored in FP8 (it would be rounded here, and the model be another),
                FP8 without scales, or scales of another shape.
        """
        part = self._slice(name)
        if not self.is_fp8(name):
            raise CheckpointError(
                f"stored as {part.get_dtype()}, and by {SECTION} it is FP8. Fix: name its module "
                f"in {SECTION}.{UNQUANTIZED} of config.json, and it is served as it is stored",
                file=self.file_of(name),
                tensor=name,
            )
        if any(start % self._block for start, _ in ranges):
            raise InternalError(f"{name}: {ranges} begin inside a block of {self._block}")
        blocks = tuple((start // self._block, -(-end // self._block)) for start, end in ranges)
        return _cut(part, ranges), _cut(self._scales(name), blocks)

    def _scales(self, name: str) -> Any:
        block, shape = self._block, self.shape_of(name)
        if name + _SCALE_SUFFIX not in self:
            raise CheckpointError(
                f"FP8 weight without {name + _SCALE_SUFFIX}", file=self.file_of(name), tensor=name
            )
        scale = self._slice(name + _SCALE_SUFFIX)
        expected = [-(-size // block) for size in shape]
        if len(shape) != 2 or list(scale.get_shape()) != expected:
            raise CheckpointError(
                f"scales have shape {scale.get_shape()}, but a weight of shape {list(shape)} in"
                f" blocks of {block} needs {expected}",
                file=self.file_of(name + _SCALE_SUFFIX),
                tensor=name + _SCALE_SUFFIX,
            )
        self._check_dtype(name + _SCALE_SUFFIX, _SCALES)
        return scale

    def _check_dtype(self, name: str, known: tuple[str, ...]) -> None:
        dtype = self._slice(name).get_dtype()
        if dtype not in known:
            raise CheckpointError(
                f"stored as {dtype}, which this server does not read. Fix: a checkpoint in BF16, "
                "or in FP8 (e4m3) with scales of blocks",
                file=self.file_of(name),
                tensor=name,
            )

    def _read_fp8(self, name: str, ranges: Ranges) -> Tensor:
        block, shape, scale = self._block, self.shape_of(name), self._scales(name)
        blocks = tuple((start // block, -(-end // block)) for start, end in ranges)
        aligned = tuple(
            (first * block, min(last * block, size))
            for (first, last), size in zip(blocks, shape, strict=True)
        )
        weight = dequantize_block(_cut(self._slice(name), aligned), _cut(scale, blocks), block)
        (row, row_end), (column, column_end) = (
            (start - outer, end - outer)
            for (start, end), (outer, _) in zip(ranges, aligned, strict=True)
        )
        return weight[row:row_end, column:column_end]

    def _open(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=file) from error
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            if name in self._file_of:
                raise CheckpointError(
                    f"also stands in {self._file_of[name].name}", file=file, tensor=name
                )
            self._file_of[name] = file
            self._handles[name] = handle

    def _slice(self, name: str) -> Any:
        return self._handles[name].get_slice(name)

    def _is_scale(self, name: str) -> bool:
        weight = name.removesuffix(_SCALE_SUFFIX)
        return weight != name and weight in self and self.is_fp8(weight)


def tensor_names(path: str | Path) -> frozenset[str]:
    """Return the names of all tensors of a checkpoint, scales of FP8 weights included.

    The index is believed, where there is one, and no other file is opened.

    Raises:
        CheckpointError: no index and no or unreadable files.
    """
    folder = Path(path)
    if (folder / INDEX).exists():
        return frozenset(_read_index(folder))
    with Checkpoint(folder) as checkpoint:
        return checkpoint.names


def _read_index(path: Path) -> dict[str, str]:
    index = path / INDEX
    try:
        weight_map = dict(parse_json(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"is not an index of safetensors: {error!r}", file=index) from error
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            problem = f"the index says {file!r}, which is no file's name"
            raise CheckpointError(problem, file=index, tensor=str(name))
    return weight_map


def _list_files(path: Path) -> list[Path]:
    if not (path / INDEX).exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError("holds no *.safetensors file", file=path)
        return files
    weight_map = _read_index(path)
    files = [path / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            tensor = next(name for name, where in weight_map.items() if where == file.name)
            raise CheckpointError("the index names a file that is absent", file=file, tensor=tensor)
    return files


def _cut(part: Any, ranges: Ranges) -> Tensor:
    cut: Tensor = part[tuple(slice(start, end) for start, end in ranges)]
    assert isinstance(cut, torch.Tensor)
    return cut
