"""Whether a checkpoint has the weights of the layers for multi-token prediction that it names.

Some that were converted or quantised afterwards have lost them, or part of them, and kept the field
of `config.json`. Only names are looked at: such a layer has all that the last layer of the model
has, and what is its own; scales of FP8 weights too, but of modules that are said not to be in FP8.
"""

from pathlib import Path
from typing import Final

from engine.config import DeepseekV3Config
from engine.hf_config.quantization import ModulePatterns
from engine.weights.checkpoint import tensor_names

_SCALE: Final = ".weight_scale_inv"
_OWN: Final = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def missing_draft_weight(path: str | Path, config: DeepseekV3Config) -> str:
    """Return the name of a tensor that such a layer needs and the checkpoint lacks; "" for none.

    Args:
        path: of the checkpoint folder.
        config: of its model.

    Raises:
        CheckpointError: its tensors cannot be listed.
    """
    names = tensor_names(path)
    first = config.num_hidden_layers
    last = f"model.layers.{first - 1}."
    shared = [name.removeprefix(last) for name in names if name.startswith(last)]
    if not config.num_moe_layers:  # it has experts where the last layer has none
        shared = [name for name in shared if not name.startswith("mlp.")]
    patterns = ModulePatterns(config.unquantized_modules)
    for layer in range(first, first + config.num_nextn_predict_layers):
        for name in sorted(f"model.layers.{layer}.{each}" for each in (*_OWN, *shared)):
            is_plain = name.endswith(_SCALE) and patterns.match(name.removesuffix(_SCALE))
            if name not in names and not is_plain:
                return name
    return ""
