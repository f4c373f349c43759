"""``tandem model ...``: look at a checkpoint, compare its arithmetic with a reference."""

from __future__ import annotations

import argparse
import collections
import math
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import add_command
from deploy.errors import ClusterError
from engine.model.registry import read_config
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers


def add_parser(commands: Subparsers) -> None:
    """Declare ``model`` and what it can do."""
    parser = add_command(
        commands,
        "model",
        help="look at checkpoints",
        examples="tandem model info /models/DeepSeek-V3",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    info = add_command(
        verbs,
        "info",
        help="sizes and data types of a checkpoint",
        description="What a checkpoint consists of, from the headers of its files alone.",
        examples="tandem model info /models/DeepSeek-V3",
    )
    folder = "a folder with config.json and *.safetensors"
    info.add_argument("path", type=Path, metavar="DIR", help=folder)
    info.set_defaults(command=run_info)
    parity = add_command(
        verbs,
        "parity",
        help="compare logits and tokens with transformers",
        description="Run the same prompts here and in transformers (which must be installed), on "
        "the CPU; 1 when they differ by more than rounding.",
        examples="tandem model parity /models/small-deepseek",
    )
    parity.add_argument("path", type=Path, metavar="DIR", help=folder)
    parity.set_defaults(command=run_parity)


def run_info(arguments: argparse.Namespace) -> int:
    """Print what a checkpoint consists of, from its headers alone."""
    config = read_config(arguments.path)
    num_bytes, num_parameters, by_dtype = _count_tensors(arguments.path)
    kv_width = config.kv_spec.width * config.num_kv_layers()
    shape = config.describe()
    rows = {
        "layers": shape["layers"],
        "hidden size": f"{config.hidden_size}, vocabulary {config.vocab_size}",
        **shape,
        "context": f"{config.max_position_embeddings} tokens",
        "KV": f"{kv_width} numbers per token",
        "parameters": f"{num_parameters:,}",
        "tensors": ", ".join(f"{count} {dtype}" for dtype, count in sorted(by_dtype.items())),
        "size": f"{num_bytes / 2**20:.1f} MiB",
    }
    notes = [("note", remark) for remark in config.remarks]
    for name, value in (*rows.items(), *notes):
        print(f"{name:<12} {value}")
    return 0


def _count_tensors(path: Path) -> tuple[int, int, dict[str, int]]:
    """(bytes, parameters without scales, tensors by data type) of all safetensors files."""
    from safetensors import SafetensorError, safe_open

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError("DIR", str(path), "holds no *.safetensors", "a checkpoint folder")
    num_bytes = num_parameters = 0
    by_dtype: collections.Counter[str] = collections.Counter()
    for file in files:
        num_bytes += file.stat().st_size
        try:
            with safe_open(file, framework="numpy") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    header = tensors.get_slice(name)
                    by_dtype[header.get_dtype()] += 1
                    if not name.endswith("_scale_inv"):
                        num_parameters += math.prod(header.get_shape())
        except SafetensorError as error:
            raise ConfigError("DIR", str(file), str(error), "download the file again") from error
    return num_bytes, num_parameters, by_dtype


def run_parity(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 when it shows a difference beyond the tolerance."""
    from bench.parity import compare_with_transformers
    from engine.weights.checkpoint import CheckpointError

    try:
        report = compare_with_transformers(arguments.path)
    except (CheckpointError, RuntimeError) as error:
        raise ClusterError(str(error)) from error
    print(report.format())
    return 0 if report.passed else 1
