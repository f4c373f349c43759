"""Fill a model from a checkpoint: check every name and shape first, then stream the slices.

A rank reads its own slices and nothing else, one at a time in the order of files, straight into the
parameters; peak memory beyond the model is one slice. Names must match exactly in both directions,
because a tensor that nobody reads is as wrong as one that is absent; exceptions are those of
`engine.weights.left_out`.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine.hf_config.quantization import SECTION
from engine.model.spec import CommonConfig
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.left_out import find_left_out
from engine.weights.slices import WeightSlice

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in total), counted as they are in the model."""


class LoadableModel(Protocol):
    """What a loader needs of a model."""

    @property
    def config(self) -> CommonConfig:
        """Of the model."""
        ...

    def weight_slices(self) -> Iterator[WeightSlice]:
        """Yield the load plan."""
        ...

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """Checkpoint names to leave out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did: slices and bytes as they are in the model, wall time."""

    num_slices: int
    num_bytes: int
    seconds: float


@torch.no_grad()
def load_weights(
    model: LoadableModel, path: str | Path, *, progress: ProgressCallback | None = None
) -> LoadReport:
    """Fill every parameter of this rank.

    Args:
        model: with uninitialised parameters.
        path: checkpoint folder.
        progress: told about bytes, after each slice.

    Raises:
        CheckpointError: a missing, left-over or misshapen tensor, by name; or unreadable files.
    """
    start = time.perf_counter()
    plan = _by_name(model.weight_slices())
    with Checkpoint(path, fp8_block_size=model.config.fp8_block_size) as checkpoint:
        _check_names(plan, checkpoint, model)
        _check_shapes(plan, checkpoint)
        _tell_format(plan, checkpoint, model.config)
        wanted = [part for name in checkpoint for part in plan.get(name, ())]
        wanted = [part for part in wanted if part.destination is not None]
        total = sum(_num_bytes(part) for part in wanted)
        done = 0
        for part in wanted:
            part.rule.read(checkpoint, part)
            done += _num_bytes(part)
            if progress is not None:
                progress(done, total)
    seconds = time.perf_counter() - start
    logger.info(
        "loaded checkpoint slices=%d bytes=%d seconds=%.2f path=%s",
        len(wanted),
        done,
        seconds,
        path,
    )
    return LoadReport(num_slices=len(wanted), num_bytes=done, seconds=seconds)


def _by_name(slices: Iterable[WeightSlice]) -> Mapping[str, list[WeightSlice]]:
    plan: dict[str, list[WeightSlice]] = defaultdict(list)
    for part in slices:
        plan[part.name].append(part)
    return plan


def _num_bytes(part: WeightSlice) -> int:
    return 0 if part.destination is None else part.destination.nbytes


def _check_names(
    plan: Mapping[str, list[WeightSlice]], checkpoint: Checkpoint, model: LoadableModel
) -> None:
    missing = [name for name in plan if name not in checkpoint]
    if missing:
        raise CheckpointError(
            f"missing tensor{_and_more(missing)}; the model needs shape"
            f" {list(plan[missing[0]][0].full_shape)}",
            file=checkpoint.path,
            tensor=missing[0],
        )
    left_over = [name for name in checkpoint if name not in plan]
    skipped = find_left_out(left_over, checkpoint, model.config, model.unused_prefixes)
    if skipped:
        kinds = [f"{kind} ({len(names)}, first {names[0]})" for kind, names in skipped.items()]
        logger.info("tensors that are not used here stay on disk: %s", ", ".join(kinds))
    known = {name for names in skipped.values() for name in names}
    unknown = [name for name in left_over if name not in known]
    if unknown:
        raise CheckpointError(
            f"left-over tensor{_and_more(unknown)}: the model has no such parameter",
            file=checkpoint.file_of(unknown[0]),
            tensor=unknown[0],
        )


def _check_shapes(plan: Mapping[str, list[WeightSlice]], checkpoint: Checkpoint) -> None:
    for name, parts in plan.items():
        expected, found = parts[0].full_shape, checkpoint.shape_of(name)
        if found != expected:
            raise CheckpointError(
                f"misshapen tensor: the model needs {list(expected)}, found {list(found)}",
                file=checkpoint.file_of(name),
                tensor=name,
            )


def _tell_format(
    plan: Mapping[str, list[WeightSlice]], checkpoint: Checkpoint, config: CommonConfig
) -> None:
    """Warn of FP8 weights of which config.json says nothing."""
    found = [] if config.fp8_block_size else [name for name in plan if checkpoint.is_fp8(name)]
    if found:
        logger.warning(
            "dequantised, as config.json has no %s num_tensors=%d first=%s",
            SECTION,
            len(found),
            found[0],
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more: {', '.join(names[1:4])})" if len(names) > 1 else ""
