"""What published checkpoints carry beside the weights is left out and told; no weight ever is."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.boot.build import build_model
from engine.weights.checkpoint import CheckpointError
from engine.weights.left_out import known_by_name
from tests.engine.tiny import random_tensors, tiny_config, write_checkpoint
from tests.engine.tiny_llama import llama_config, llama_tensors

LAYER = "model.layers.0.self_attn."
ROTARY = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)}
KV_SCALES = (
    f"{LAYER}k_scale",
    f"{LAYER}attn.v_scale",
    f"{LAYER}kv_scale",
    f"{LAYER}kv_cache_scaling_factor",
)
ACTIVATIONS = (f"{LAYER}o_proj.input_scale", f"{LAYER}o_proj.output_scale")


def load(folder: Path, tensors: Mapping[str, Tensor], **changes: Any) -> None:
    config = tiny_config(**changes)
    build_model(write_checkpoint(folder, config, tensors={**random_tensors(config), **tensors}))


def told(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [r.getMessage() for r in caplog.records if "stay on disk" in r.getMessage()]
    return line.partition(": ")[2]


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="engine.weights.loader")


def test_kinds_are_counted_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    extra = {**ROTARY, **dict.fromkeys((*KV_SCALES, *ACTIVATIONS), torch.ones(1))}
    extra[f"{LAYER}o_proj.weight_scale"] = torch.ones(1)
    load(
        tmp_path,
        {name: tensor.clone() for name, tensor in extra.items()},
        num_nextn_predict_layers=0,
    )
    line = told(caplog)
    assert f"rotary_emb (3, first {next(iter(ROTARY))})" in line
    assert f"scales of a KV cache (4, first {LAYER}" in line
    assert f"scales of activations (2, first {LAYER}" in line
    assert f"scales of weights that are not quantised (1, first {LAYER}o_proj.weight_scale)" in line
    assert known_by_name(extra) == {
        "rotary_emb": 3,
        "scales of a KV cache": 4,
        "scales of activations": 2,
    }


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}o_proj.bias",
        f"{LAYER}rotary_emb.weight",
        f"{LAYER}extra.weight_scale",
        "model.layers.3.mlp.gate.weight",
        "model.vision.weight",
        "lm_head.bias",
    ],
)
def test_whatever_else_nobody_reads_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="left-over tensor") as caught:
        load(tmp_path, {name: torch.ones(4)}, num_nextn_predict_layers=0)
    assert caught.value.tensor == name


def test_scales_of_another_kind_of_fp8_are_an_error(tmp_path: Path) -> None:
    name = f"{LAYER}o_proj.weight"
    weight = random_tensors(tiny_config())[name].to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, {name: weight, f"{name}_scale": torch.ones(1)})
    assert caught.value.tensor == f"{name}_scale"


def test_draft_layers_that_config_json_leaves_out_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = random_tensors(tiny_config())
    more = {name: tensor for name, tensor in drafts.items() if name.startswith("model.layers.3.")}
    load(tmp_path, more, num_nextn_predict_layers=0)
    assert f"layers that are not used ({len(more)}, first model.layers.3." in told(caplog)


@pytest.mark.parametrize("with_mtp", [False, True])
def test_a_draft_layer_repeats_embedding_and_head(
    tmp_path: Path, with_mtp: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As DeepSeek-V3 is published."""
    config = tiny_config()
    tensors = random_tensors(config)
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    build_model(write_checkpoint(tmp_path, config, tensors=tensors), with_mtp=with_mtp)
    num = 2 if with_mtp else sum(name.startswith("model.layers.3.") for name in tensors)
    assert told(caplog).startswith(f"layers that are not used ({num}, first model.layers.3.")


def test_a_tied_head_has_to_equal_the_embedding(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.weights.left_out._ROWS", 50)
    config = llama_config(tie_word_embeddings=True)
    tensors = llama_tensors(config)
    head = tensors["model.embed_tokens.weight"].clone()
    build_model(write_checkpoint(tmp_path, config, tensors={**tensors, "lm_head.weight": head}))
    assert told(caplog) == "a head that equals the embedding (1, first lm_head.weight)"
    for other in (head[:-1].clone(), head.clone()):
        other[-1, -1] += 1
        write_checkpoint(tmp_path, config, tensors={**tensors, "lm_head.weight": other})
        with pytest.raises(CheckpointError, match=r"tie_word_embeddings = false") as caught:
            build_model(tmp_path)
        assert caught.value.tensor == "lm_head.weight"
