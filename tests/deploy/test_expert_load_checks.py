"""What a recording to start from must be, told before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deploy.checks.cluster import check_config
from engine.model.registry import read_config
from experts.trace import ExpertTrace
from runtime.config import ClusterConfig, PrefillSection
from runtime.config.file import load_config
from runtime.errors import ConfigError
from tests.deploy.fakes import fake_config


def recorded(config: ClusterConfig, folder: Path, role: str) -> str:
    """A recording of the model of a configuration."""
    model = read_config(config.model.path).experts
    assert model is not None
    trace = ExpertTrace(
        counts_NLE=np.ones((1, model.num_moe_layers, model.n_routed_experts), dtype=np.int64),
        tokens_N=np.array([model.n_routed_experts]),
        role=role,
        model_name=config.model.name or Path(config.model.path).name,
        top_k=model.num_experts_per_tok,
        num_ranks=2,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        expert_bytes=1,
    )
    trace.save(folder / f"{role}.npz")
    return str(folder / f"{role}.npz")


def with_load(config: ClusterConfig, role: str, path: str) -> ClusterConfig:
    section = dataclasses.replace(getattr(config, role), expert_load=path)
    return dataclasses.replace(config, **{role: section})


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_recording_of_the_role_passes_and_of_the_other_does_not(
    role: str, tmp_path: Path
) -> None:
    config = fake_config(tmp_path, prefill_tp=2, decode_dp=2)
    check_config(with_load(config, role, recorded(config, tmp_path, role)), num_devices=0)
    other = {"prefill": "decode", "decode": "prefill"}[role]
    with pytest.raises(ConfigError, match=f"was recorded of {other}") as caught:
        check_config(with_load(config, role, recorded(config, tmp_path, other)), num_devices=0)
    assert caught.value.path == f"{role}.expert_load"


def test_a_recording_of_a_model_by_another_name_is_refused(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    path = recorded(config, tmp_path, "decode")
    model = dataclasses.replace(config.model, name="another")
    with pytest.raises(ConfigError, match="and this is 'another'") as caught:
        check_config(
            with_load(dataclasses.replace(config, model=model), "decode", path), num_devices=0
        )
    assert caught.value.path == "decode.expert_load"


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    config = with_load(fake_config(tmp_path), "decode", str(tmp_path / "none.npz"))
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        check_config(config, num_devices=0)
    assert caught.value.path == "decode.expert_load"


def test_a_path_starts_from_the_folder_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[decode]\nexpert_load = "decode.npz"\n')
    assert load_config(file).decode.expert_load == str(tmp_path / "decode.npz")


def test_sliced_experts_have_no_places() -> None:
    for field, value in (("num_redundant_experts", 2), ("expert_load", "prefill.npz")):
        with pytest.raises(ConfigError, match="a slice of all experts") as caught:
            PrefillSection(tp=2, expert_parallel=False, **{field: value})
        assert caught.value.path == f"prefill.{field}"


def test_redundant_experts_of_prefill_are_dealt_to_its_ranks(tmp_path: Path) -> None:
    config = fake_config(tmp_path, prefill_tp=2)
    for number, is_even in ((2, True), (1, False)):
        section = dataclasses.replace(config.prefill, num_redundant_experts=number)
        changed = dataclasses.replace(config, prefill=section)
        if is_even:
            check_config(changed, num_devices=0)
        else:
            with pytest.raises(ConfigError) as caught:
                check_config(changed, num_devices=0)
            assert caught.value.path == "prefill.tp"
