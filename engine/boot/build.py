"""From a checkpoint folder to a model on this rank, ready to run: the boot of every worker.

Reads as a list: configuration, check, allocate, load. The KV pool is built apart, because its size
is decided after the model's memory is known.
"""

import logging
import re
from collections import Counter
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path

import torch

from engine.execution import Execution
from engine.experts.placements import ExpertPlacements
from engine.kernels.base import Kernels
from engine.layers.matrix import Matrix
from engine.memory.kv_pool import KVPool
from engine.model.registry import read_config, spec_of
from engine.model.spec import BuildOptions, CommonConfig, ServedModel
from engine.parallel.groups import ProcessGroups
from engine.weights.dummy import fill_with_dummy_weights
from engine.weights.loader import load_weights
from engine.weights.progress import progress_bar
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^model\.layers\.\d+\.")


class LoadFormat(StrEnum):
    """Where weights come from."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


def build_model(
    source: str | Path | CommonConfig,
    groups: ProcessGroups | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    load_format: LoadFormat | str = LoadFormat.SAFETENSORS,
    with_mtp: bool = False,
    progress: bool = False,
    kernels: Kernels | None = None,
    placements: ExpertPlacements | None = None,
    execution: Execution | None = None,
) -> ServedModel:
    """Build this rank's model and fill it.

    Args:
        source: checkpoint folder; a configuration is enough for dummy weights.
        groups: the ranks that share the model; None for one process.
        dtype: compute dtype.
        device: of this rank.
        load_format: where weights come from.
        with_mtp: build the multi-token-prediction layers.
        progress: show a bar on stderr.
        kernels: that the model runs on; None for the fastest of the device.
        placements: slots of the routed experts of each layer; None for one each.
        execution: how steps run on several ranks; None for what fits `groups`.

    Raises:
        ConfigError: an unsupported model, axes that do not divide it, too few devices, or a
            configuration without a folder to load from.
        CheckpointError: tensors that do not fit, by name.
    """
    load_format = LoadFormat(load_format)
    config = read_config(source) if isinstance(source, str | Path) else source
    groups = groups or ProcessGroups()
    _check_device(groups, torch.device(device))
    _check_mtp(config, with_mtp)
    options = BuildOptions(
        groups=groups,
        dtype=dtype,
        device=torch.device(device),
        with_mtp=with_mtp,
        placements=placements,
        kernels=kernels,
        execution=execution,
    )
    model = spec_of(config).build(config, options)
    _tell_plain_weights(model)
    with progress_bar("loading weights") if progress else nullcontext() as moved:
        if load_format is LoadFormat.DUMMY:
            fill_with_dummy_weights(model, progress=moved)
        elif not isinstance(source, str | Path):
            raise ConfigError(
                "model.path", "", "nowhere to load weights from", "name a folder, or load 'dummy'"
            )
        else:
            load_weights(model, source, progress=moved)
    return model.eval()


def build_kv_pool(
    model: ServedModel,
    num_blocks: int,
    *,
    block_size: int = 64,
    dtype: torch.dtype | None = None,
) -> KVPool:
    """Allocate the KV pool that fits a model, on its device.

    Args:
        model: decides layers, widths and device.
        num_blocks: the dummy block 0 included.
        block_size: tokens per block.
        dtype: of the storage; None for the model's.
    """
    num_layers = model.config.num_kv_layers(with_mtp=model.with_mtp)
    return KVPool(
        num_blocks,
        num_layers,
        block_size,
        model.kv_spec,
        dtype=dtype or model.dtype,
        device=model.device,
        num_mtp_layers=num_layers - model.config.num_kv_layers(),
    )


def describe_plain_weights(model: ServedModel) -> str:
    """Say what is held in the compute dtype although its checkpoint may have it in FP8, and why.

    It takes twice the memory and is multiplied without FP8, which nobody may find out by a number
    that is too low. Layers that are alike are counted; empty if there is nothing to say.
    """
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Matrix) and module.plain_because:
            kind = (_LAYER.sub("", name).removesuffix(".matrix"), module.plain_because)
            counts[kind] += 1
            first.setdefault(kind, name.removesuffix(".matrix"))
    return "; ".join(
        f"{first[kind]}{f' and {count - 1} alike' if count > 1 else ''} ({kind[1]})"
        for kind, count in counts.items()
    )


def _tell_plain_weights(model: ServedModel) -> None:
    """Warn, once for all ranks, of FP8 weights that a GPU does not hold in FP8."""
    plain = describe_plain_weights(model)
    block, kernels = model.config.fp8_block_size, model.kernels
    if model.device.type == "cuda" and block and not model.number_format.is_quantized:
        plain = f"all weights (FP8 in blocks of {block}; the kernels {kernels.name!r} take "
        plain += f"{kernels.formats.describe()})"
    if plain and model.groups.dims.rank == 0:
        name = str(model.dtype).removeprefix("torch.")
        logger.warning("held in %s and not in FP8, with more memory: %s", name, plain)


def _check_device(groups: ProcessGroups, device: torch.device) -> None:
    num_visible = torch.cuda.device_count() if device.type == "cuda" else 0
    # A rank that sees one device was given it; how many there are is not ours to know then.
    if device.type == "cuda" and num_visible != 1:
        groups.dims.check_devices(num_visible, "cuda")


def _check_mtp(config: CommonConfig, with_mtp: bool) -> None:
    if with_mtp and not config.num_nextn_predict_layers:
        raise ConfigError(
            "num_nextn_predict_layers",
            0,
            "multi-token prediction was asked for, and the checkpoint has no such layer",
            "turn it off or use a checkpoint that has one",
        )
