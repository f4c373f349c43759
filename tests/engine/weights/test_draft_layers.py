"""A layer for multi-token prediction that is named and not, or not wholly, there is found."""

from pathlib import Path

import pytest

from engine.boot.build import build_model
from engine.config import DeepseekV3Config
from engine.model.registry import read_config
from engine.weights.checkpoint import CheckpointError, tensor_names
from engine.weights.draft_layers import missing_draft_weight
from tests.engine.tiny import random_tensors, tiny_config, to_fp8, write_checkpoint

CONFIG = tiny_config()
MODEL = DeepseekV3Config.from_hf(CONFIG)
LAYER = f"model.layers.{MODEL.num_hidden_layers}."
REPEATED = ("embed_tokens.weight", "shared_head.head.weight")
"""The model's own, which a checkpoint may leave out."""


def written(path: Path, without: str = "", **options: object) -> Path:
    tensors = random_tensors(CONFIG, 0)
    kept = {name: each for name, each in tensors.items() if not without or name != without}
    return write_checkpoint(path, CONFIG, tensors=kept, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_files", [1, 3])
def test_nothing_is_missing_from_a_whole_layer(tmp_path: Path, num_files: int) -> None:
    path = written(tmp_path, num_files=num_files)
    assert missing_draft_weight(path, MODEL) == ""
    assert tensor_names(path) == set(random_tensors(CONFIG, 0))


def test_what_is_found_missing_is_what_a_load_lacks(tmp_path: Path) -> None:
    """Each tensor of the layer by turns, and no other."""
    names = [name for name in random_tensors(CONFIG, 0) if name.startswith(LAYER)]
    experts = f"{LAYER}mlp.experts."
    names = [name for name in names if not name.startswith(experts) or ".0." in name]
    for place, name in enumerate(names):
        path = written(tmp_path / str(place), without=name)
        if name.removeprefix(LAYER) in REPEATED:
            assert missing_draft_weight(path, MODEL) == ""
            build_model(path, with_mtp=True)
            continue
        assert missing_draft_weight(path, MODEL) == name
        with pytest.raises(CheckpointError):
            build_model(path, with_mtp=True)
        build_model(path)


def test_a_layer_that_is_gone(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, 0)
    kept = {name: each for name, each in tensors.items() if not name.startswith(LAYER)}
    path = write_checkpoint(tmp_path, CONFIG, tensors=kept)
    assert missing_draft_weight(path, MODEL).startswith(LAYER)
    build_model(path)


def test_a_layer_that_is_not_quantised_as_the_others_lacks_its_scales(tmp_path: Path) -> None:
    """Its modules are not named either, so a load would take it for FP8."""
    whole = random_tensors(CONFIG, 0)
    tensors = to_fp8(whole)
    kept = {
        name: whole[name] if name in whole and name.startswith(LAYER) else each
        for name, each in tensors.items()
        if not (name.startswith(LAYER) and name.endswith("_scale_inv"))
    }
    path = write_checkpoint(tmp_path, CONFIG, tensors=kept)
    assert missing_draft_weight(path, MODEL).endswith("_scale_inv")


def test_modules_that_are_said_not_to_be_quantised_have_none(tmp_path: Path) -> None:
    attention = f"{LAYER}self_attn"
    path = write_checkpoint(tmp_path, CONFIG, fp8=True, unquantized=[attention])
    model = read_config(path)
    assert isinstance(model, DeepseekV3Config)
    assert missing_draft_weight(path, model) == ""
    build_model(path, with_mtp=True)


def test_experts_are_not_looked_for_in_a_dense_last_layer(tmp_path: Path) -> None:
    config = tiny_config(first_k_dense_replace=CONFIG["num_hidden_layers"])
    path = write_checkpoint(tmp_path, config)
    assert missing_draft_weight(path, DeepseekV3Config.from_hf(config)) == ""


def test_what_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        missing_draft_weight(tmp_path, MODEL)
