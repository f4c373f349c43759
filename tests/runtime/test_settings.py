"""``SECTION.FIELD=VALUE`` of a command line: typed and checked as in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config import ClusterConfig, ClusterSection
from runtime.config.file import load_config, with_settings
from runtime.errors import ConfigError


def test_values_have_the_type_of_their_field(tmp_path: Path) -> None:
    settings = (
        "prefill.enable_prefix_caching=false",
        "decode.max_num_seqs=3",
        "router.lease_ttl_s=9",
        "kv_transfer.transport=loopback",
        'model.name="quoted"',
        "cluster.name=7",
    )
    config = with_settings(ClusterConfig(), settings)
    assert config.prefill.enable_prefix_caching is False
    assert config.decode.max_num_seqs == 3
    assert config.router.lease_ttl_s == 9.0
    assert config.kv_transfer.transport == "loopback"
    assert config.model.name == "quoted"
    assert config.cluster.name == "7"


def test_fields_that_are_checked_together_are_set_together() -> None:
    settings = ("prefill.block_size=32", "decode.block_size=16", "decode.block_size=32")
    config = with_settings(ClusterConfig(), settings)
    assert (config.prefill.block_size, config.decode.block_size) == (32, 32)


def test_what_is_not_set_stays_secrets_too() -> None:
    config = ClusterConfig(cluster=ClusterSection(secret="sesame"))
    assert with_settings(config, ["router.port=9000"]).cluster == config.cluster


@pytest.mark.parametrize(
    ("setting", "path", "fix"),
    [
        ("decode", "--set", "decode.instances=2"),
        ("decode=1", "--set", "decode.instances=2"),
        ("decode.instances", "--set", "decode.instances=2"),
        ("decod.instances=1", "decod.instances", "did you mean decode.instances?"),
        ("decode.instance=1", "decode.instance", "did you mean decode.instances?"),
        ("tls.qqqqqqqqqqq=1", "tls.qqqqqqqqqqq", "one of tls.mode, tls.cert"),
        ("xxxxx.qqqqqqqqq=1", "xxxxx.qqqqqqqqq", "one of cluster, tls, model"),
        ("tiers.share=1", "--set", "[[tiers]] of the file"),
        ("decode.dp=two", "decode.dp", "a value of type int"),
        ("decode.dp=1.5", "decode.dp", "a value of type int"),
        ("decode.dp=0", "decode.dp", "1 or more"),
        ("prefill.enable_prefix_caching=yes", "prefill.enable_prefix_caching", "type bool"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting: str, path: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_settings(ClusterConfig(), [setting])
    assert caught.value.path == path
    assert fix in caught.value.fix


def test_relative_paths_start_from_the_folder_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    files = ("tls.mode=files", "tls.ca=/ca.pem", "tls.cert=c.pem", "tls.key=k.pem")
    settings = ("model.path=weights", "cluster.run_dir=~/runs", *files)
    config = with_settings(ClusterConfig(), settings, base=tmp_path)
    assert config.model.path == str(tmp_path / "weights")
    assert config.cluster.run_dir == str(tmp_path / "home" / "runs")
    assert config.tls.ca == "/ca.pem"
    assert config.tls.cert == str(tmp_path / "c.pem")
    assert with_settings(ClusterConfig(), (), base=tmp_path) == ClusterConfig()


def test_paths_of_a_file_start_at_the_file_or_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = tmp_path / "cluster.toml"
    file.write_text("[model]\npath = '~/weights'\n[cluster]\nrun_dir = 'runs'")
    config = load_config(file)
    assert config.model.path == str(tmp_path / "home" / "weights")
    assert config.cluster.run_dir == str(tmp_path / "runs")


def test_a_model_of_the_hub_is_no_path_unless_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[model]\npath = 'deepseek-ai/DeepSeek-V3'")
    assert load_config(file).model.path == "deepseek-ai/DeepSeek-V3"
    folder = tmp_path / "deepseek-ai" / "DeepSeek-V3"
    folder.mkdir(parents=True)
    assert load_config(file).model.path == str(folder)
