"""A dense model of another architecture passes the checks, and what it has not is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deploy.checks.cluster import check_config, resolve_config
from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from tests.deploy.fakes import fake_config
from tests.engine.tiny_llama import TINY_LLAMA


def llama_cluster(folder: Path, *, prefill_tp: int = 1) -> ClusterConfig:
    config = fake_config(folder, prefill_tp=prefill_tp)
    (folder / "model" / "config.json").write_text(json.dumps(dict(TINY_LLAMA)))
    decode = dataclasses.replace(config.decode, num_speculative_tokens="default")
    return resolve_config(dataclasses.replace(config, decode=decode))


@pytest.mark.parametrize("prefill_tp", [1, 4])
def test_it_is_accepted_on_a_cpu(tmp_path: Path, prefill_tp: int) -> None:
    config = llama_cluster(tmp_path, prefill_tp=prefill_tp)
    assert config.decode.num_speculative_tokens == 0, "it has no layer that makes drafts"
    check_config(config, num_devices=0)


def test_ranks_that_heads_cannot_be_divided_over_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads = 4") as caught:
        check_config(llama_cluster(tmp_path, prefill_tp=8), num_devices=0)
    assert (caught.value.path, caught.value.value) == ("prefill.tp", 8)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_gpus_are_refused_with_what_is_missing(tmp_path: Path, role: str) -> None:
    config = llama_cluster(tmp_path)
    section = dataclasses.replace(getattr(config, role), device="cuda")
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no attention for GPUs") as caught:
        check_config(dataclasses.replace(config, **{role: section}), num_devices=8)
    assert (caught.value.path, caught.value.value) == (f"{role}.device", "cuda")
    assert '"cpu"' in caught.value.fix


def test_redundant_experts_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    config = llama_cluster(tmp_path)
    decode = dataclasses.replace(config.decode, num_redundant_experts=4)
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts") as caught:
        check_config(dataclasses.replace(config, decode=decode), num_devices=0)
    assert (caught.value.path, caught.value.value) == ("decode.num_redundant_experts", 4)
