"""The checkpoint folder: a trained model written as FP8 in the tensor names of DeepSeek-V3, and
read back.

Reading here gives the training model with dequantised weights, for evaluation and tests; servers
read the folder with their own loader. Linear weights of the decoder layers are e4m3 with
`weight_scale_inv`; the embedding, the output head, norms, routers and the MTP projection stay
bfloat16, and the routing bias float32, as in the full checkpoint. The MTP layer repeats the
embedding and the head, as there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.weights.fp8 import dequantize_block, quantize_block
from tools.training.architecture import model_config
from tools.training.model import DenseExperts, TrainedModel

WEIGHTS_FILE: Final = "model.safetensors"
_SCALE: Final = "_scale_inv"
_KEPT: Final = re.compile(r"norm|embed_tokens|head|mlp\.gate\.|eh_proj")
_BIAS: Final = "e_score_correction_bias"


def save_checkpoint(model: TrainedModel, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config()
    _write_json(folder / "config.json", config)
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in special})
    tensors = dict(sorted(quantise(export_state(model)).items()))
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_checkpoint(folder: Path) -> TrainedModel:
    """Return the model of a folder in float32, on the CPU, with FP8 weights dequantised.

    Raises:
        ValueError: a tensor is missing, or one is left over.
    """
    model = TrainedModel(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    state = dequantise(load_file(folder / WEIGHTS_FILE))
    expected = export_state(model)
    if state.keys() != expected.keys():
        raise ValueError(f"{folder} differs in tensors: {sorted(state.keys() ^ expected.keys())}")
    with torch.no_grad():
        # The exported tensors are views of the parameters, so this fills the model.
        for name, tensor in expected.items():
            tensor.copy_(state[name])
    return model


def export_state(model: TrainedModel) -> dict[str, Tensor]:
    """Return every tensor under its name in the checkpoint, as views of the parameters."""
    return {name: tensor.detach() for name, tensor in _named_tensors(model)}


def quantise(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as stored: e4m3 with scales, bfloat16, or float32 for the bias."""
    stored: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if is_quantised(name):
            stored[name], stored[name + _SCALE] = quantize_block(tensor)
        else:
            dtype = torch.float32 if name.endswith(_BIAS) else torch.bfloat16
            stored[name] = tensor.to(dtype)
    return {name: tensor.cpu().contiguous().clone() for name, tensor in stored.items()}


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo `quantise`: float32 tensors without the scales."""
    return {
        name: dequantize_block(tensor, stored[name + _SCALE])
        if name + _SCALE in stored
        else tensor.float()
        for name, tensor in stored.items()
        if not name.endswith(_SCALE)
    }


def is_quantised(name: str) -> bool:
    """Whether a tensor of that checkpoint name is stored as FP8."""
    return name.endswith(".weight") and not _KEPT.search(name)


def _named_tensors(model: TrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from _module_tensors(model.main, "")
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    mtp = model.mtp
    yield from _module_tensors(mtp.block, prefix)
    for name in ("enorm", "hnorm", "eh_proj"):
        yield f"{prefix}{name}.weight", getattr(mtp, name).weight
    yield f"{prefix}shared_head.norm.weight", mtp.norm.weight
    yield f"{prefix}shared_head.head.weight", model.main.lm_head.weight
    yield f"{prefix}embed_tokens.weight", model.main.model.embed_tokens.weight


def _module_tensors(root: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for path, module in root.named_modules():
        base = f"{prefix}{path}." if path else prefix
        if isinstance(module, DenseExperts):
            yield from _expert_tensors(module, base)
            continue
        for name, parameter in module.named_parameters(recurse=False):
            yield base + name, parameter
        if hasattr(module, _BIAS):
            yield base + _BIAS, getattr(module, _BIAS)


def _expert_tensors(experts: DenseExperts, base: str) -> Iterator[tuple[str, Tensor]]:
    for index in range(len(experts.down_proj)):
        gate, up = experts.gate_up_proj[index].chunk(2)
        yield f"{base}{index}.gate_proj.weight", gate
        yield f"{base}{index}.up_proj.weight", up
        yield f"{base}{index}.down_proj.weight", experts.down_proj[index]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
