"""What `tandem validate` says of checkpoints: templates, what was joined, what is left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from deploy.checkpoint.report import checkpoint_lines
from runtime.config import ClusterConfig, ModelSection, RouterSection
from runtime.errors import ConfigError
from tests.router.conftest import write_model


def report(folder: Path, load_format: str = "dummy", models_file: str = "") -> list[str]:
    config = ClusterConfig(
        model=ModelSection(path=str(folder), load_format=load_format),
        router=RouterSection(models_file=models_file),
    )
    return list(checkpoint_lines(config))


def test_templates_and_what_was_joined_are_told(tmp_path: Path) -> None:
    write_model(tmp_path)
    first = "template     tokenizer_config.json: reads messages, system messages"
    (template, without_tools) = report(tmp_path)
    assert template == first
    assert "the checkpoint has a chat template without tools" in without_tools
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("{% if %}")
    template, broken, tools, joined = report(tmp_path)
    assert template == first
    assert tools == without_tools
    assert broken.startswith("note         the template 'rag' is not used, and is no chat template")
    assert joined.startswith("note         the files name different ends of an answer")
    (tmp_path / "chat_template.jinja").write_text("{% generation %}{{ tools }}{% endgeneration %}")
    assert report(tmp_path)[0] == "template     chat_template.jinja: reads tools"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja.*line 1"):
        report(tmp_path)


def test_every_model_of_the_router_is_told(tmp_path: Path) -> None:
    write_model(tmp_path)
    beside = tmp_path / "beside"
    beside.mkdir()
    write_model(beside)
    content = json.loads((beside / "tokenizer_config.json").read_text())
    del content["chat_template"]
    (beside / "tokenizer_config.json").write_text(json.dumps(content))
    models = tmp_path / "models.toml"
    models.write_text(f'[models.second]\npath = "{beside}"\n')
    *_, name, template, note = report(tmp_path, models_file=str(models))
    assert name == "beside it    second"
    assert template == "template     none: /v1/completions only"
    assert "the checkpoint has no chat template" in note


def test_tensors_that_nobody_reads_are_told(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    write_model(tmp_path)
    tensors = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(2) for n in range(3)}
    save_file({"lm_head.weight": np.ones(2), **tensors}, tmp_path / "model.safetensors")
    assert report(tmp_path, "safetensors")[-1] == (
        "note         tensors that are not used here: rotary_emb (3)"
    )
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        report(tmp_path, "safetensors")
