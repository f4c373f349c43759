"""Drafts that are left to the cluster: the same answer in every process that has the file."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.checkpoint.model_folder import BUNDLED_MODEL
from deploy.checks.drafts import decide_drafts
from engine.config import DeepseekV3Config
from engine.model.registry import read_config
from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from runtime.config.file import SECRET_VARIABLE, dump_config
from runtime.errors import ConfigError
from tests.deploy.fakes import write_model
from tests.engine.tiny import random_tensors, tiny_config, write_checkpoint
from tests.engine.tiny_llama import llama_config, write_llama
from tests.worker.test_arguments import arguments
from worker.arguments import WorkerOptions, parse_worker_options
from worker.auto_drafts import decided, with_possible_drafts, without_drafts
from worker.engine_options import engine_options, model_options

ROLES = ("prefill", "decode")


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")


def options_of(role: str, folder: Path, text: str) -> WorkerOptions:
    """Those of a rank that reads a file with this text."""
    return parse_worker_options(role, arguments(folder, text, rank="0"))


def decided_of(role: str, folder: Path, model: Path, decode: str = "") -> int | str:
    """What a rank comes to by a file with these lines of its section `decode`."""
    text = f'[model]\npath = "{model}"\n[decode]\n{decode}\n'
    return decided(options_of(role, folder, text)).config.decode.num_speculative_tokens


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("num_layers", "asked", "expected"),
    [
        (0, "", 0),
        (1, "", 1),
        (0, '"default"', 0),
        (1, '"default"', 1),
        (0, '"auto"', 0),
        (1, '"auto"', "auto"),
        (0, "2", 2),
        (1, "2", 2),
        (1, "0", 0),
    ],
)
def test_what_is_open_is_none_without_the_layer_and_a_number_is_left_to_be_refused(
    tmp_path: Path, role: str, num_layers: int, asked: str, expected: int | str
) -> None:
    path = write_model(tmp_path, num_nextn_predict_layers=num_layers)
    line = asked and f"num_speculative_tokens = {asked}"
    assert decided_of(role, tmp_path, path, line) == expected


@pytest.mark.parametrize("role", ROLES)
def test_the_bundled_model_has_a_draft_by_default(tmp_path: Path, role: str) -> None:
    assert decided_of(role, tmp_path, BUNDLED_MODEL) == 1


def without_layer(folder: Path) -> Path:
    """A checkpoint that says that it has the layer, and has lost it."""
    tensors = random_tensors(tiny_config())
    layer = f"model.layers.{tiny_config()['num_hidden_layers']}."
    kept = {name: each for name, each in tensors.items() if not name.startswith(layer)}
    return write_checkpoint(folder, tiny_config(), tensors=kept)


def with_another_format(folder: Path) -> Path:
    """A checkpoint whose layer has its experts in another format than the others."""
    layer = f"model.layers.{tiny_config()['num_hidden_layers']}.mlp.experts"
    return write_checkpoint(folder, tiny_config(), fp8=True, unquantized=[layer])


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (lambda folder: write_llama(folder, llama_config()), "has no layer for multi-token"),
        (without_layer, "lacks model.layers."),
        (with_another_format, "routed experts are served in one format"),
    ],
    ids=["llama", "lost", "another format"],
)
@pytest.mark.parametrize("asked", ["", 'num_speculative_tokens = "auto"'])
def test_there_are_none_of_a_checkpoint_that_cannot_make_them(
    tmp_path: Path, write: Any, why: str, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "model")
    for role in ROLES:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="worker.auto_drafts"):
            assert decided_of(role, tmp_path, path, asked) == 0
        (line,) = [each.getMessage() for each in caplog.records if "no drafts" in each.getMessage()]
        assert why in line


@pytest.mark.parametrize("role", ROLES)
def test_weights_that_are_invented_are_not_looked_for(tmp_path: Path, role: str) -> None:
    text = f'[model]\npath = "{without_layer(tmp_path / "model")}"\nload_format = "dummy"\n'
    chosen = decided(options_of(role, tmp_path, text)).config
    assert chosen.decode.num_speculative_tokens == 1


DEVICES = st.sampled_from(["cpu", "cuda"])
CONFIGS = st.builds(
    ClusterConfig,
    model=st.builds(ModelSection, path=st.just("/nowhere"), load_format=st.just("dummy")),
    prefill=st.builds(
        PrefillSection, device=DEVICES, tp=st.sampled_from([1, 2]), num_blocks=st.just(64)
    ),
    decode=st.builds(
        DecodeSection,
        device=DEVICES,
        dp=st.sampled_from([1, 2, 4]),
        num_blocks=st.just(64),
        max_num_seqs=st.sampled_from([1, 32, 64, 65, 128, 256]),
        max_tokens_per_rank=st.sampled_from([64, 128, 256]),
        num_speculative_tokens=st.sampled_from(["default", "auto", 0, 1, 2, 3]),
    ),
)


def as_many_as_fit(config: ClusterConfig, roles: tuple[str, ...]) -> ClusterConfig:
    """`config` with blocks left open on those GPUs."""
    sections = {
        role: dataclasses.replace(getattr(config, role), num_blocks=0)
        for role in roles
        if getattr(config, role).device == "cuda"
    }
    return dataclasses.replace(config, **sections)


def rank_of(role: str, config: ClusterConfig, folder: Path) -> WorkerOptions:
    """A rank that has `config` as its file."""
    extra = {"rendezvous": "127.0.0.1:9"}
    return parse_worker_options(role, arguments(folder, dump_config(config), rank="0", **extra))


@given(config=CONFIGS, roles=st.sampled_from([(), ("prefill",), ("decode",), ROLES]))
def test_both_roles_and_whoever_starts_them_come_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, config: ClusterConfig, roles: tuple[str, ...]
) -> None:
    """And what they come to starts wherever it would start without drafts."""
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "model", tiny_config(n_routed_experts=8))
    model = dataclasses.replace(config.model, path=str(folder / "model"))
    config = as_many_as_fit(dataclasses.replace(config, model=model), roles)
    asked = config.decode.num_speculative_tokens
    prefill, decode = (decided(rank_of(role, config, folder)).config for role in ROLES)
    assert prefill == decode
    started, _ = decide_drafts(config, read_config(folder / "model"))
    assert started.decode == decode.decode
    number = decode.decode.num_speculative_tokens
    assert dataclasses.replace(decode.decode, num_speculative_tokens=asked) == config.decode
    assert model_options(prefill).with_mtp is model_options(decode).with_mtp is (number != 0)
    if asked != "default":
        assert number == asked
        return
    assert number in (0, 1)
    assert with_possible_drafts(started, read_config(folder / "model")) == (started, "")
    if config.decode.device == "cuda" and config.decode.dp > 1:
        try:
            engine_options(without_drafts(config).decode).check_rows()
        except ConfigError:
            assert number == 0
        else:
            engine_options(decode.decode).check_rows()
    has_given_blocks = any(
        section.device == "cuda" and section.sizes.num_blocks
        for section in (config.prefill, config.decode)
    )
    assert not (has_given_blocks and number)


GPU = {"device": "cuda"}


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        ({}, {}, ""),
        ({"device": "cpu", "num_blocks": 64}, {}, ""),
        ({"num_blocks": 64}, {}, "prefill.num_blocks = 64: whether a GPU has room"),
        ({}, {"num_blocks": 64}, "decode.num_blocks = 64: whether a GPU has room"),
        ({}, {"dp": 2, "max_num_seqs": 64}, ""),
        ({}, {"dp": 2, "num_blocks": 0}, ""),
        ({}, {"dp": 2, "max_num_seqs": 256}, ""),
        ({}, {"dp": 2, "max_num_seqs": 257}, "with one decode.max_num_seqs = 257"),
        (
            {},
            {"dp": 2, "max_num_seqs": 65, "max_tokens_per_rank": 128},
            "with one decode.max_num_seqs = 65",
        ),
        ({}, {"dp": 2, "max_num_seqs": 128, "max_tokens_per_rank": 256}, ""),
        ({}, {"dp": 1, "max_num_seqs": 128}, ""),
        ({}, {"dp": 2, "max_num_seqs": 128, "device": "cpu", "num_blocks": 64}, ""),
    ],
)
def test_a_draft_by_default_needs_room_that_is_known(
    prefill: dict[str, Any], decode: dict[str, Any], why: str
) -> None:
    config = ClusterConfig(
        model=ModelSection(load_format="dummy"),
        prefill=PrefillSection(**{**GPU, **prefill}),
        decode=DecodeSection(**{**GPU, **decode}),
    )
    chosen, reason = with_possible_drafts(config, DeepseekV3Config.from_hf(tiny_config()))
    assert chosen.decode.num_speculative_tokens == (0 if why else 1)
    assert why in reason
    assert bool(reason) == bool(why)


def test_what_nobody_has_decided_is_no_answer() -> None:
    with pytest.raises(AssertionError):
        _ = DecodeSection().has_drafts
