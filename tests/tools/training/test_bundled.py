"""The checkpoint in the repository: its size, its tensors, and that it has learned something."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from engine.weights.fp8 import scale_shape
from tools.training.architecture import model_config
from tools.training.checkpoint import WEIGHTS_FILE, is_quantised, load_checkpoint
from tools.training.conversation import Exchange
from tools.training.dataset import CHECKPOINT
from tools.training.evaluate import greedy, measure
from tools.training.model import TrainedModel
from tools.training.tokenizer import EOS, render

pytestmark = pytest.mark.nightly

FOLDER = Path(__file__).parents[3] / CHECKPOINT
MAX_BYTES = 40_000_000
# Written for this test: no file of the corpus contains it.
SNIPPET = '''import os
import json


class Inventory:
    """Count the goods of a small shop."""

    def __init__(self, path=None):
        self.path = path
        self.items = {}
        if path is not None and os.path.exists(path):
            self.load()

    def load(self):
        with open(self.path, encoding="utf-8") as f:
            self.items = json.load(f)

    def add(self, name, count=1):
        """Add some goods; raise ValueError if the count is negative."""
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count

    def __len__(self):
        return sum(self.items.values())

    def __repr__(self):
        return f"{self.__class__.__name__}({self.items!r})"


if __name__ == "__main__":
    inventory = Inventory()
    inventory.add("apple", 3)
    for name, count in sorted(inventory.items.items()):
        print(name, count)
'''


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype by name, without reading the data."""
    with safe_open(FOLDER / WEIGHTS_FILE, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return load_checkpoint(FOLDER).eval()


def test_the_folder_is_small_and_complete() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MAX_BYTES
    assert {path.name for path in files} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_config_is_the_one_of_the_code() -> None:
    assert json.loads((FOLDER / "config.json").read_text(encoding="utf-8")) == model_config()


@pytest.mark.parametrize(
    "field", ["num_attention_heads", "n_routed_experts", "vocab_size", "intermediate_size"]
)
def test_every_parallel_size_divides(field: str) -> None:
    value = model_config()[field]
    assert isinstance(value, int)
    assert value % 8 == 0


def test_linear_weights_are_fp8_with_scales(
    tensors: dict[str, tuple[tuple[int, ...], str]],
) -> None:
    weights = {name for name in tensors if not name.endswith("_scale_inv")}
    for name in weights:
        shape, dtype = tensors[name]
        if is_quantised(name):
            assert dtype == "F8_E4M3"
            rows, columns = shape
            assert tensors[name + "_scale_inv"] == (scale_shape(rows, columns), "F32")
        else:
            assert dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16")
            assert name + "_scale_inv" not in tensors


def test_names_are_those_of_the_full_checkpoint(
    tensors: dict[str, tuple[tuple[int, ...], str]],
) -> None:
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    linear = {f"model.layers.{i}.self_attn.{name}" for i in range(6) for name in attention}
    linear |= {f"model.layers.0.mlp.{name}" for name in mlp}
    for layer in range(1, 6):
        base = f"model.layers.{layer}.mlp"
        linear |= {f"{base}.shared_experts.{name}" for name in mlp}
        linear |= {f"{base}.experts.{expert}.{name}" for expert in range(16) for name in mlp}
    quantised = {name.removesuffix(".weight") for name in tensors if is_quantised(name)}
    assert quantised == linear
    norms = ("input_layernorm", "post_attention_layernorm")
    norms += ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
    others = {f"model.layers.{i}.{name}.weight" for i in range(6) for name in norms}
    gates = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
    others |= {f"model.layers.{i}.{name}" for i in range(1, 6) for name in gates}
    extra = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head")
    others |= {f"model.layers.5.{name}.weight" for name in extra}
    others |= {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected = others | {f"{name}.weight{end}" for name in linear for end in ("", "_scale_inv")}
    assert set(tensors) == expected


def test_it_predicts_code_it_has_not_seen(model: TrainedModel) -> None:
    """A model that knows only token frequencies needs more than 6 nats on code."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = torch.tensor(tokenizer.encode(SNIPPET).ids)
    quality = measure(model, ids, torch.ones(4096, dtype=torch.int64))
    assert quality.loss < 1.6
    assert quality.mtp_loss < 1.8
    assert quality.mtp_acceptance > 0.7
    assert all(1.0 < skew < 4.0 for skew in quality.load_skew)


def test_it_answers_a_chat_request_with_a_function(model: TrainedModel) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompt = render(Exchange(question="Return the number of lines in a file.", answer=""))
    ids = tokenizer.encode(prompt.removesuffix(EOS), add_special_tokens=False).ids
    answer = tokenizer.decode(greedy(model, ids, 12))
    assert answer.startswith("def ")
