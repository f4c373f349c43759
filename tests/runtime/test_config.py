"""The configuration file: strict reading, messages with path and fix, round trip."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import (
    ClusterConfig,
    ClusterSection,
    DecodeSection,
    KVTransferSection,
    PrefillSection,
    RouterSection,
    TierSection,
    TlsSection,
)
from runtime.config.file import (
    cluster_credentials,
    dump_config,
    load_config,
    parse_config,
    with_settings,
)
from runtime.errors import ConfigError

TWO_TIERS = (
    '[[tiers]]\nname = "max"\nshare = 0.5\ndefault = true\n'
    '[[tiers]]\nname = "{}"\norder = {}\nshare = {}'
)


def test_defaults_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(dump_config(ClusterConfig()))
    assert load_config(path) == ClusterConfig()
    assert load_config(None) == ClusterConfig()


@given(st.text(max_size=30), st.integers(1, 65535), st.floats(0.5, 1e6))
def test_values_round_trip(name: str, port: int, timeout_s: float) -> None:
    import tomllib

    config = ClusterConfig(router=RouterSection(port=port, control_port=0))
    router = dataclasses.replace(config.router, request_timeout_s=timeout_s)
    cluster = dataclasses.replace(config.cluster, name=name.replace("\x7f", ""))
    printable = "".join(c for c in cluster.name if c.isprintable())
    config = dataclasses.replace(
        config, router=router, cluster=dataclasses.replace(cluster, name=printable)
    )
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_tiers_round_trip() -> None:
    import tomllib

    table = tomllib.loads(TWO_TIERS.format("base", 3, 0.25))
    config = parse_config(table)
    assert config.tiers == (
        TierSection(name="max", share=0.5, default=True),
        TierSection(name="base", order=3, share=0.25),
    )
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "path", "fix"),
    [
        ("[prefil]\ntp = 1", "prefil", "did you mean prefill?"),
        ("[prefill]\ntpp = 1", "prefill.tpp", "did you mean prefill.tp?"),
        ("[prefill]\ntp = 'two'", "prefill.tp", "type int"),
        ("[prefill]\ntp = true", "prefill.tp", "type int"),
        ("[prefill]\ntp = 0", "prefill.tp", "1 or more"),
        ("[prefill]\ndp = 0", "prefill.dp", "1 or more"),
        (
            "[router]\ninstances = 3\nport = 8098\ncontrol_port = 8100",
            "router.control_port",
            "at least 3 apart",
        ),
        ("[router]\ninstances = 3\nport = 65534", "router.port", "0 for any"),
        ("[prefill]\ndp = 2\ntp = 2", "prefill.dp", "prefill.tp = 1"),
        (
            "[prefill]\ndp = 2\nexpert_parallel = false",
            "prefill.expert_parallel",
            "more prefill.instances",
        ),
        ("[router]\nport = 70000", "router.port", "65535"),
        ("[router]\npolicy = 'random'", "router.policy", "least-loaded"),
        ("[router]\ntool_parser = 'qwen'", "router.tool_parser", "hermes"),
        ("[router]\nreasoning_parser = 'r1'", "router.reasoning_parser", "deepseek-r1"),
        ("[router]\nport = 9000\ncontrol_port = 9000", "router.control_port", "another port"),
        ("[decode]\nblock_size = 32", "decode.block_size", "the same block size"),
        ('[decode]\nkv_dtype = "fp8"', "decode.kv_dtype", "the same kv_dtype"),
        ("[kv_transfer]\nfaults = 'explode=1'", "kv_transfer.faults", "one of delay"),
        ('[cluster]\nhost = "0.0.0.0"', "cluster.host", "set cluster.advertise"),
        ('[cluster]\nadvertise = "::"', "cluster.advertise", "this host's address"),
        ('[tls]\nmode = "on"', "tls.mode", "off, files, auto"),
        ('[tls]\nmode = "files"\ncert = "c"\nca = "a"', "tls.key", "a PEM file"),
        ('[tls]\nca = "a"', "tls.ca", 'tls.mode = "files"'),
        (
            '[cluster]\nhost = "10.0.0.5"\n[kv_transfer]\ntransport = "mooncake"',
            "kv_transfer.transport",
            "kv_transfer.allow_open_data_ports = true",
        ),
        ("prefill = 3", "prefill", "[prefill]"),
        ('[tiers]\nname = "max"', "tiers", "[[tiers]]"),
        ("[[tiers]]\norder = 1", "tiers.name", "1 to 32 of"),
        ('[[tiers]]\nname = "auto"', "tiers.name", "another name"),
        ('[[tiers]]\nname = "max"\nttft = 1', "tiers.ttft", "did you mean tiers.ttft_ms?"),
        ('[[tiers]]\nname = "max"\nshare = 1.5', "tiers.max.share", "0 to 1"),
        ('[[tiers]]\nname = "max"\nshare = -1', "tiers.max.share", "0.0 or more"),
        ('[[tiers]]\nname = "max"\ntpot_ms = nan', "tiers.max.tpot_ms", "a finite number"),
        ('[[tiers]]\nname = "max"\norder = -1', "tiers.max.order", "0 or more"),
        (TWO_TIERS.format("max", 1, 0.1), "tiers.name", "two names"),
        (TWO_TIERS.format("base", 0, 0.1), "tiers.base.order", "one for each tier"),
        (TWO_TIERS.format("base", 1, 0.6), "tiers.base.share", "1 or less together"),
        (
            TWO_TIERS.format("base", 1, 0.1) + "\ndefault = true",
            "tiers.base.default",
            "one default",
        ),
        (
            TWO_TIERS.format("base", 1, 0.1) + "\n[prefill]\nmax_num_seqs = 1",
            "tiers",
            "fewer, or larger steps",
        ),
        ("[prefill", "file", "mend"),
    ],
)
def test_a_bad_field_is_named_with_its_fix(tmp_path: Path, text: str, path: str, fix: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert caught.value.path == path
    assert fix in caught.value.fix
    assert path in str(caught.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.toml")


def test_a_relative_model_path_starts_at_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("[model]\npath = 'weights'")
    assert load_config(file).model.path == str(tmp_path / "weights")


def test_a_former_secret_comes_from_the_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = ClusterSection(secret="new", previous_secret="old")
    monkeypatch.setenv("TANDEM_PREVIOUS_SECRET", "older")
    found = cluster_credentials(ClusterConfig(cluster=section))
    assert (found.secret, found.previous_secret) == ("new", "old")
    section = dataclasses.replace(section, previous_secret="")
    assert cluster_credentials(ClusterConfig(cluster=section)).previous_secret == "older"
    both = dump_config(ClusterConfig(cluster=ClusterSection(secret="sesame", previous_secret="x")))
    assert "secret" not in both


def test_files_of_tls_start_from_the_folder_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        '[tls]\nmode = "files"\ncert = "cert.pem"\nkey = "/keys/key.pem"\nca = "ca.pem"\n'
    )
    files = load_config(file).tls.files
    assert files is not None
    assert (files.cert, files.key) == (str(tmp_path / "cert.pem"), "/keys/key.pem")
    assert files.mutual
    assert not files.http_mutual


def test_only_a_whole_cluster_makes_certificates() -> None:
    config = ClusterConfig(cluster=ClusterSection(secret="s"), tls=TlsSection(mode="auto"))
    with pytest.raises(ConfigError, match="tandem up"):
        cluster_credentials(config)


@pytest.mark.parametrize(
    ("cluster", "router", "endpoint"),
    [
        ({}, "", "http://127.0.0.1:8000/v1"),
        ({}, "0.0.0.0", "http://127.0.0.1:8000/v1"),
        ({"host": "10.0.0.5"}, "127.0.0.1", "http://127.0.0.1:8000/v1"),
        ({"host": "0.0.0.0", "advertise": "node"}, "", "http://node:8000/v1"),
        ({"host": "::1"}, "", "http://[::1]:8000/v1"),
    ],
)
def test_where_http_is_reached(cluster: dict[str, str], router: str, endpoint: str) -> None:
    config = ClusterConfig(cluster=ClusterSection(**cluster), router=RouterSection(host=router))
    assert config.endpoint == endpoint
    encrypted = dataclasses.replace(config, tls=TlsSection(mode="auto"))
    assert encrypted.endpoint == endpoint.replace("http:", "https:")


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_open_data_ports_beyond_this_machine_must_be_asked_for(transport: str) -> None:
    def config(host: str, **changes: bool) -> ClusterConfig:
        section = KVTransferSection(transport=transport, **changes)
        return ClusterConfig(
            cluster=ClusterSection(host=host, advertise="node"), kv_transfer=section
        )

    assert config("127.0.0.1").kv_transfer.transport == transport
    for host in ("10.0.0.5", "0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="ask nobody for a secret"):
            config(host)
        assert config(host, allow_open_data_ports=True).kv_transfer.transport == transport
    with pytest.raises(ConfigError, match=f"means {transport}"):
        KVTransferSection().check_data_ports(transport, "10.0.0.5")
    KVTransferSection().check_data_ports("loopback", "10.0.0.5")


def test_the_secret_comes_from_the_file_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ClusterConfig()
    monkeypatch.delenv("TANDEM_SECRET", raising=False)
    with pytest.raises(ConfigError, match="TANDEM_SECRET"):
        cluster_credentials(config)
    monkeypatch.setenv("TANDEM_SECRET", "from-environment")
    assert cluster_credentials(config).secret == "from-environment"
    section = dataclasses.replace(config.cluster, secret="from-file")
    assert cluster_credentials(dataclasses.replace(config, cluster=section)).secret == "from-file"
    assert "from-file" not in dump_config(dataclasses.replace(config, cluster=section))


@pytest.mark.parametrize("section", [PrefillSection, DecodeSection])
def test_steps_overlap_where_it_helps_or_as_told(
    section: type[PrefillSection] | type[DecodeSection],
) -> None:
    assert section().max_ahead == 0
    assert section(device="cuda").max_ahead == 1
    assert section(overlap_steps="on").max_ahead == 1
    assert section(device="cuda", overlap_steps="off").max_ahead == 0
    with pytest.raises(ConfigError, match="overlap_steps"):
        section(overlap_steps="1")


def test_steps_are_captured_on_gpus_unless_told_otherwise() -> None:
    assert not DecodeSection(cuda_graphs="on").wants_graphs
    assert DecodeSection(device="cuda").wants_graphs
    assert not DecodeSection(device="cuda", cuda_graphs="off").wants_graphs
    with pytest.raises(ConfigError, match="cuda_graphs"):
        DecodeSection(cuda_graphs="yes")
    with pytest.raises(ConfigError, match=r"prefill\.cuda_graphs"):
        PrefillSection(cuda_graphs="yes")


@pytest.mark.parametrize("section", [PrefillSection, DecodeSection])
def test_blocks_are_counted_by_hand_or_by_a_gpu(
    section: type[PrefillSection] | type[DecodeSection],
) -> None:
    assert section(device="cuda", num_blocks=0).num_blocks == 0
    for changes, field in (
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"num_blocks": -1, "device": "cuda"}, "num_blocks"),
        ({"gpu_memory_fraction": 0.0}, "gpu_memory_fraction"),
        ({"gpu_memory_fraction": 1.1}, "gpu_memory_fraction"),
    ):
        with pytest.raises(ConfigError) as caught:
            section(**changes)  # type: ignore[arg-type]
        assert caught.value.path.endswith(f".{field}")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"two_batch_overlap": "yes", "tp": 2}, "two_batch_overlap"),
        ({"two_batch_overlap": "on"}, "two_batch_overlap"),
        ({"scatter_tokens": "true"}, "scatter_tokens"),
        ({"scatter_tokens": "on"}, "scatter_tokens"),
        ({"scatter_tokens": "on", "tp": 2, "expert_parallel": False}, "scatter_tokens"),
        ({"max_masked_tokens": 64, "dp": 2}, "max_masked_tokens"),
        ({"max_masked_tokens": -1}, "max_masked_tokens"),
        ({"max_masked_tokens": "some"}, "max_masked_tokens"),
    ],
)
def test_ranks_are_not_asked_for_what_they_cannot_exchange(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        PrefillSection(**changes)  # type: ignore[arg-type]
    assert caught.value.path == f"prefill.{field}"


def test_a_field_may_be_a_number_or_a_word() -> None:
    for text, value in (("auto", "auto"), ("64", 64), ('"auto"', "auto"), ("0", 0)):
        config = with_settings(ClusterConfig(), [f"prefill.max_masked_tokens={text}"])
        assert config.prefill.max_masked_tokens == value
        assert parse_config(tomllib.loads(dump_config(config))) == config
    for text in ("1.5", "true"):
        with pytest.raises(ConfigError, match="a value of type int or str"):
            with_settings(ClusterConfig(), [f"prefill.max_masked_tokens={text}"])


def test_tokens_are_scattered_over_ranks_with_whole_experts() -> None:
    assert PrefillSection(tp=2).is_scattered
    assert PrefillSection(tp=2, scatter_tokens="on").is_scattered
    assert not PrefillSection(tp=2, scatter_tokens="off").is_scattered
    assert not PrefillSection(tp=2, expert_parallel=False).is_scattered
    assert not PrefillSection().is_scattered


def test_a_decode_rank_takes_on_four_times_what_it_runs_unless_it_is_told() -> None:
    assert DecodeSection(max_num_seqs=7).num_places == 28
    assert DecodeSection(max_num_seqs=7, max_num_reserved=5).num_places == 5


@pytest.mark.parametrize("section", [PrefillSection, DecodeSection])
def test_copies_of_experts_are_held_only_where_experts_move(
    section: type[PrefillSection] | type[DecodeSection],
) -> None:
    assert section().rebalance_host_gib == 0.0
    assert section(rebalance_experts="on", rebalance_host_gib=8.0).rebalance_host_gib == 8.0
    for changes in (
        {"rebalance_host_gib": 8.0},
        {"rebalance_experts": "on", "rebalance_host_gib": -1.0},
    ):
        with pytest.raises(ConfigError) as caught:
            section(**changes)  # type: ignore[arg-type]
        assert caught.value.path.endswith(".rebalance_host_gib")
