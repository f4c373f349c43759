"""A rank that cannot work is refused before torch is even imported, with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.config.file import SECRET_VARIABLE
from runtime.errors import ConfigError
from worker.arguments import parse_worker_options

CONFIG = (
    '[model]\npath = "model"\n[decode]\ndp = 2\nnum_speculative_tokens = 0\n'
    '[cluster]\nhost = "127.0.0.2"\n'
)
"""Of a checkpoint that is not there: left open, drafts would be asked of it."""


def arguments(folder: Path, text: str = CONFIG, **changes: str) -> list[str]:
    file = folder / "cluster.toml"
    file.write_text(text)
    given = {"rank": "1", "rendezvous": "127.0.0.1:9", "router": "127.0.0.1:8", **changes}
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    return ["--config", str(file), "--instance", "decode-0", *flags]


def test_a_rank_knows_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    options = parse_worker_options("decode", arguments(tmp_path))
    assert options.section is options.config.decode
    assert (options.instance, options.rank, options.listen.bind) == ("decode-0", 1, "127.0.0.2")
    assert options.served_name == "model"
    assert options.grace_s == 30.0
    assert parse_worker_options("decode", arguments(tmp_path, grace="2.5")).grace_s == 2.5
    elsewhere = arguments(tmp_path, host="0.0.0.0", advertise="node-3")
    assert parse_worker_options("decode", elsewhere).listen.address(80) == "node-3:80"


def test_a_rank_takes_any_free_ports_unless_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    options = parse_worker_options("decode", arguments(tmp_path))
    assert (options.listen.port, options.metrics_port, options.data_port) == (0, 0, 0)
    assert options.calls_port == 0
    ports = {"port": "9000", "metrics-port": "9100", "data-port": "9200", "calls-port": "9310"}
    options = parse_worker_options("decode", arguments(tmp_path, **ports))
    assert (options.listen.port, options.metrics_port, options.data_port) == (9000, 9100, 9200)
    assert options.calls_port == 9310


def test_a_rank_on_all_interfaces_must_be_told_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    with pytest.raises(ConfigError, match=r"cluster\.advertise"):
        parse_worker_options("decode", arguments(tmp_path, host="0.0.0.0"))


def test_a_prefill_rank_counts_against_tp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    with pytest.raises(ConfigError, match=r"prefill\.tp is 1"):
        parse_worker_options("prefill", arguments(tmp_path))
    options = parse_worker_options("prefill", arguments(tmp_path, rank="0"))
    assert options.section is options.config.prefill


def test_or_against_dp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    text = CONFIG + "[prefill]\ndp = 4\n"
    assert parse_worker_options("prefill", arguments(tmp_path, text, rank="3")).rank == 3
    with pytest.raises(ConfigError, match=r"prefill\.dp is 4"):
        parse_worker_options("prefill", arguments(tmp_path, text, rank="4"))


@pytest.mark.parametrize(
    ("text", "changes", "path"),
    [
        (CONFIG, {"rank": "2"}, "--rank"),
        (CONFIG, {"rendezvous": ""}, "--rendezvous"),
        (CONFIG, {"grace": "-1"}, "--grace"),
        (CONFIG, {"grace": "inf"}, "--grace"),
        (CONFIG, {"port": "65536"}, "--port"),
        (CONFIG, {"metrics-port": "-1"}, "--metrics-port"),
        (CONFIG, {"port": "9000", "data-port": "9000"}, "--port"),
        ("[decode]\ndp = 2\n", {}, "model.path"),
    ],
)
def test_what_cannot_work_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    changes: dict[str, str],
    path: str,
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "s")
    with pytest.raises(ConfigError) as caught:
        parse_worker_options("decode", arguments(tmp_path, text, **changes))
    assert caught.value.path == path


def test_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="no secret"):
        parse_worker_options("decode", arguments(tmp_path))
