"""What is refused before anything starts: the field, the reason, the fix."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest

from deploy.checkpoint.model_folder import BUNDLED_MODEL
from deploy.checks.cluster import (
    check_config,
    check_ports,
    remarks_of,
    resolve_config,
)
from deploy.devices import count_devices
from deploy.ports import free_port
from runtime.config import ClusterConfig, DecodeSection
from runtime.errors import ConfigError
from tests.deploy.fakes import MODEL_FIELDS, fake_config, write_model


def refused(config: ClusterConfig, *, num_devices: int = 0) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        check_config(config, num_devices=num_devices)
    return raised.value


def with_section(config: ClusterConfig, section: str, /, **changes: object) -> ClusterConfig:
    changed = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})


def test_a_good_configuration_passes(tmp_path: Path) -> None:
    check_config(fake_config(tmp_path, prefill_tp=4, decode_dp=8), num_devices=0)


def test_resolving_fills_in_what_is_open() -> None:
    config = with_section(ClusterConfig(), "router", port=0, control_port=0)
    resolved = resolve_config(config)
    assert resolved.model.path == str(BUNDLED_MODEL)
    assert resolved.model.name == BUNDLED_MODEL.name
    assert 0 < resolved.router.port != resolved.router.control_port > 0
    assert resolve_config(resolved) == resolved


def test_each_host_of_a_ray_cluster_has_an_address_of_its_own(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    joined = with_section(config, "cluster", ray_address="198.51.100.9:6379", network="127.0.0.0/8")
    assert resolve_config(joined).cluster.host == "127.0.0.1"
    for field, value in (("host", "10.0.0.7"), ("advertise", "node-7")):
        with pytest.raises(ConfigError) as raised:
            resolve_config(with_section(joined, "cluster", **{field: value}))
        assert raised.value.path == f"cluster.{field}"
        assert "cluster.network" in raised.value.fix
    with pytest.raises(ConfigError, match=r"cluster\.network = '203\.0\.113\.0/24': host"):
        resolve_config(with_section(joined, "cluster", network="203.0.113.0/24"))


def test_certificates_may_be_made_for_many_hosts(tmp_path: Path) -> None:
    config = with_section(fake_config(tmp_path), "cluster", ray_address="198.51.100.9:6379")
    check_config(with_section(config, "tls", mode="auto"), num_devices=0)


def test_routers_of_several_hosts_have_no_address_in_common(tmp_path: Path) -> None:
    config = with_section(fake_config(tmp_path), "cluster", ray_address="198.51.100.9:6379")
    for host, number in (("10.0.0.7", 1), ("0.0.0.0", 2), ("", 2)):
        check_config(with_section(config, "router", host=host, instances=number), num_devices=0)
    error = refused(with_section(config, "router", host="10.0.0.7", instances=2))
    assert error.path == "router.host"
    assert "several hosts" in error.problem


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    write_model(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    error = refused(config)
    assert error.path == "model.path"
    assert "Qwen3ForCausalLM" in error.problem
    assert "DeepseekV3ForCausalLM" in error.fix


def test_what_the_checkpoint_s_config_leaves_open_is_named_with_its_default(tmp_path: Path) -> None:
    """As transformers reads it: 8 groups, of which a model of 8 experts cannot have any."""
    config = fake_config(tmp_path)
    fields = {name: value for name, value in MODEL_FIELDS.items() if name != "n_group"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    error = refused(config)
    assert error.path == "model.path"
    assert "n_group = 8 in its config.json" in error.problem
    assert "leaves out n_group = 8: transformers' defaults" in error.problem


@pytest.mark.parametrize(
    ("prefill", "decode", "given", "expected"),
    [
        ("cpu", "cpu", "auto", "float32"),
        ("cuda", "cuda", "auto", "bfloat16"),
        ("cuda", "cpu", "auto", "bfloat16"),
        ("cpu", "cuda", "auto", "bfloat16"),
        ("cuda", "cuda", "float32", "float32"),
        ("cpu", "cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_compute_type_follows_the_devices(
    tmp_path: Path, prefill: str, decode: str, given: str, expected: str
) -> None:
    config = with_section(fake_config(tmp_path), "model", dtype=given)
    config = with_section(config, "prefill", device=prefill)
    config = with_section(config, "decode", device=decode)
    assert config.compute_dtype == expected
    resolved = resolve_config(config)
    assert (resolved.model.dtype, resolved.compute_dtype) == (expected, expected)
    is_odd = expected == "float32" and "cuda" in (prefill, decode)
    assert len(remarks_of(config)) == is_odd


def test_both_roles_store_kv_in_what_the_compute_type_comes_to(tmp_path: Path) -> None:
    config = with_section(fake_config(tmp_path), "model", dtype="auto")
    config = with_section(config, "prefill", device="cuda", kv_dtype="bfloat16")
    assert config.compute_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="prefill stores its KV in float32"):
        with_section(config, "prefill", device="cuda", kv_dtype="float32")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    error = refused(with_section(fake_config(tmp_path), "model", path=str(tmp_path / "nothing")))
    assert error.path == "model.path"


@pytest.mark.parametrize(
    ("name", "load_format"),
    [("tokenizer.json", "dummy"), ("model.safetensors", "safetensors")],
)
def test_an_incomplete_checkpoint_is_refused(tmp_path: Path, name: str, load_format: str) -> None:
    config = with_section(fake_config(tmp_path), "model", load_format=load_format)
    (tmp_path / "model" / name).unlink()
    error = refused(config)
    assert error.path == "model.path"
    assert error.problem.startswith(f"holds no {name.replace('model', '*')}")


@pytest.mark.parametrize(
    ("section", "field", "value", "size"),
    [
        ("prefill", "tp", 3, "num_attention_heads"),
        ("prefill", "dp", 5, "experts"),
        ("decode", "dp", 5, "experts"),
    ],
)
def test_ranks_that_do_not_divide_the_model_are_refused(
    tmp_path: Path, section: str, field: str, value: int, size: str
) -> None:
    error = refused(with_section(fake_config(tmp_path), section, **{field: value}))
    assert error.path == f"{section}.{field}"
    assert error.value == value
    assert size in error.problem


@pytest.mark.parametrize(
    ("prefill_device", "decode_device", "num_devices", "path"),
    [
        ("cuda", "cpu", 1, "prefill.tp"),
        ("cpu", "cuda", 3, "decode.dp"),
        ("cuda", "cuda", 5, "decode.dp"),
        ("cuda", "cuda", 0, "prefill.device"),
    ],
)
def test_more_ranks_than_devices_are_refused(
    tmp_path: Path, prefill_device: str, decode_device: str, num_devices: int, path: str
) -> None:
    config = fake_config(tmp_path, prefill_tp=2, decode_dp=4)
    config = with_section(config, "prefill", device=prefill_device)
    config = with_section(config, "decode", device=decode_device)
    error = refused(config, num_devices=num_devices)
    assert error.path == path
    assert f"this machine has {num_devices}" in error.problem
    check_config(config, num_devices=6)


def test_data_parallel_prefill_ranks_need_devices_too(tmp_path: Path) -> None:
    config = with_section(fake_config(tmp_path), "prefill", device="cuda", dp=4)
    error = refused(config, num_devices=3)
    assert (error.path, error.value) == ("prefill.dp", 4)
    check_config(config, num_devices=4)


def test_drafts_of_a_checkpoint_that_makes_none_are_refused(tmp_path: Path) -> None:
    config = with_section(fake_config(tmp_path), "decode", num_speculative_tokens=1)
    write_model(tmp_path, num_nextn_predict_layers=1)
    check_config(config, num_devices=0)
    write_model(tmp_path, num_nextn_predict_layers=0)
    assert refused(config).path == "decode.num_speculative_tokens"


@pytest.mark.parametrize(
    ("asked", "num_layers", "decided"),
    [("auto", 1, "auto"), ("auto", 0, 0), ("default", 1, 1), ("default", 0, 0)],
)
def test_what_is_open_is_none_where_the_checkpoint_has_no_layer(
    tmp_path: Path,
    asked: str,
    num_layers: int,
    decided: int | str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And what runs without drafts is refused for nothing else."""
    config = with_section(fake_config(tmp_path), "decode", num_speculative_tokens=asked)
    write_model(tmp_path, num_nextn_predict_layers=num_layers)
    with caplog.at_level("INFO", logger="deploy.checks.drafts"):
        resolved = resolve_config(config)
    assert resolved.decode.num_speculative_tokens == decided
    check_config(resolved, num_devices=0)
    assert resolve_config(resolved) == resolved
    told = [record.getMessage() for record in caplog.records if "no drafts" in record.getMessage()]
    assert len(told) == (decided == 0)


@pytest.mark.parametrize("count", [-1, 4])
def test_one_layer_drafts_no_more_than_three_tokens(count: int) -> None:
    with pytest.raises(ConfigError, match=r"decode\.num_speculative_tokens"):
        DecodeSection(num_speculative_tokens=count)


@pytest.mark.parametrize("word", ["off", "all", ""])
def test_a_word_that_is_no_number_of_drafts_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match=r"decode\.num_speculative_tokens.*\"auto\", or 0 to 3"):
        DecodeSection(num_speculative_tokens=word)


def test_a_context_longer_than_the_model_s_is_refused(tmp_path: Path) -> None:
    error = refused(with_section(fake_config(tmp_path), "model", max_model_len=513))
    assert (error.path, error.value) == ("model.max_model_len", 513)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pool_that_cannot_hold_one_request_is_refused(tmp_path: Path, role: str) -> None:
    config = with_section(fake_config(tmp_path), role, num_blocks=8)
    error = refused(config)
    assert error.path == f"{role}.num_blocks"
    assert error.fix.startswith("9 or more")
    check_config(with_section(config, role, num_blocks=9), num_devices=0)
    check_config(with_section(config, "model", max_model_len=448), num_devices=0)


@pytest.mark.parametrize("field", ["max_concurrent_requests", "max_connections"])
def test_a_router_that_lets_in_less_than_decode_runs_is_refused(tmp_path: Path, field: str) -> None:
    config = fake_config(tmp_path, decode_dp=8)
    num_slots = config.decode.instances * 8 * config.decode.sizes.max_num_seqs
    error = refused(with_section(config, "router", **{field: num_slots - 1}))
    assert error.path == f"router.{field}"
    assert f"{num_slots} or more" in error.fix
    check_config(with_section(config, "router", **{field: num_slots}), num_devices=0)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 64])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    assert refused(with_section(fake_config(tmp_path), "cluster", name=name)).path == "cluster.name"


@pytest.mark.parametrize("field", ["port", "control_port"])
def test_a_port_in_use_is_refused_by_its_name(tmp_path: Path, field: str) -> None:
    config = fake_config(tmp_path)
    check_ports(config)
    address = (config.cluster.host, getattr(config.router, field))
    with socket.create_server(address), pytest.raises(ConfigError) as raised:
        check_ports(config)
    assert raised.value.path == f"router.{field}"
    assert f"set router.{field} to a free port" in raised.value.fix


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
def test_a_host_that_is_not_here_is_refused_by_its_name(host: str) -> None:
    cluster = dataclasses.replace(ClusterConfig().cluster, host=host)
    with pytest.raises(ConfigError, match="no address of this machine") as caught:
        resolve_config(dataclasses.replace(ClusterConfig(), cluster=cluster))
    assert caught.value.path == "cluster.host"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_free_port_can_be_listened_on(host: str) -> None:
    with socket.create_server((host, free_port(host))) as listener:
        assert listener.getsockname()[1]


def test_a_free_port_is_given_to_nobody_else() -> None:
    """Of 28,000 ports 300 are taken out; 5,000 draws would else meet about 50 of them."""
    reserved = {free_port("127.0.0.1") for _ in range(300)}
    drawn = set()
    for _ in range(5000):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            drawn.add(other.getsockname()[1])
    assert not reserved & drawn


def test_hidden_devices_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_devices() == 0
