"""The training model: the fast experts against the library's, causality, and what MTP may see."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from tests.tools.training.tiny import tiny_config
from tools.training.checkpoint import dequantise, export_state, save_checkpoint
from tools.training.model import TrainedModel

pytestmark = pytest.mark.nightly


@pytest.fixture
def model() -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(tiny_config(), dropout=0.5).eval()


@torch.no_grad()
def test_dense_experts_equal_the_library(model: TrainedModel) -> None:
    ours = model.main.model.layers[1].mlp
    library = DeepseekV3MoE(model.config)
    library.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, 9, 32)
    torch.testing.assert_close(ours(hidden), library(hidden))
    assert int(model.expert_layers()[0].load.sum()) == 2 * 9 * 4


@torch.no_grad()
def test_neither_head_sees_the_future(model: TrainedModel) -> None:
    ids = torch.randint(3, 64, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    (main, drafted), (main_changed, drafted_changed) = model(ids), model(changed)
    assert main.shape == (1, 12, 64)
    assert drafted.shape == (1, 11, 64)
    torch.testing.assert_close(main[:, :8], main_changed[:, :8])
    assert not torch.allclose(main[:, 8], main_changed[:, 8])
    # MTP at position t reads the embedding of t + 1, thus position 7 already sees the change.
    torch.testing.assert_close(drafted[:, :7], drafted_changed[:, :7])
    assert not torch.allclose(drafted[:, 7], drafted_changed[:, 7])


@torch.no_grad()
def test_dropout_acts_in_training_only(model: TrainedModel) -> None:
    ids = torch.randint(3, 64, (1, 12))
    assert torch.equal(model(ids)[0], model(ids)[0])
    model.train()
    assert not torch.equal(model(ids)[0], model(ids)[0])


@torch.no_grad()
def test_the_library_loads_the_export(model: TrainedModel, tmp_path: Path) -> None:
    stored = {name: tensor.clone() for name, tensor in export_state(model).items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {**tiny_config(), "torch_dtype": "float32"}
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    library = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(3, 64, (2, 20))
    torch.testing.assert_close(library(ids).logits, model(ids)[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_stored_model_differs_by_rounding_only(model: TrainedModel, tmp_path: Path) -> None:
    save_checkpoint(model, tmp_path)
    restored = dequantise(load_file(tmp_path / "model.safetensors"))
    for name, tensor in export_state(model).items():
        error = (restored[name] - tensor).norm() / tensor.norm().clamp_min(1e-9)
        assert float(error) < 0.04, name
