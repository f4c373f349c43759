"""``tandem keys``, and what the other commands make of keys."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from pathlib import Path

import pytest

from deploy.checks.posture import posture_of
from deploy.cli import main
from deploy.control.events import EventKind, read_events
from deploy.hosts.places import Place, Places
from deploy.plan import Role, plan_instances, process_specs
from router.keys.file import read_keys
from router.keys.record import PREFIX, KeyLimits, Right, hash_key
from router.keys.source import KEYS_VARIABLE, KeySource, key_source
from router.service import HttpWorkerService, RouterService
from runtime.config import ClusterConfig, ClusterSection, KVTransferSection, RouterSection
from runtime.config.file import dump_config, load_config
from runtime.errors import ConfigError
from tests.deploy.fakes import fake_config, fake_context

SMALL = '[kv_transfer]\ntransport = "loopback"\n'


def test_a_new_key_is_printed_once_and_its_hash_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    limits = ["--rpm", "60", "--tpm", "9000", "--concurrency", "3"]
    models = ["--model", "a/b", "--model", "c", "--cache-salt", "team"]
    assert main(["keys", "add", "alice", "--file", str(file), *limits, *models]) == 0
    shown = capsys.readouterr()
    key = shown.out.strip()
    assert key.startswith(PREFIX)
    assert key not in shown.err + file.read_text()
    record = KeySource(str(file)).current().find(key)
    assert record is not None
    assert (record.name, record.sha256) == ("alice", hash_key(key))
    assert (record.models, record.tenant) == (("a/b", "c"), "team")
    assert record.limits == KeyLimits(
        requests_per_minute=60, tokens_per_minute=9000, max_concurrent_requests=3
    )
    assert main(["keys", "add", "bob", "--file", str(file)]) == 0
    assert main(["keys", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert "alice" in listed
    assert "60 requests/min 9000 tokens/min 3 at once models a/b, c cache of team" in listed
    assert "no limits" in listed
    assert main(["keys", "remove", "alice", "--file", str(file)]) == 0
    assert [each.name for each in read_keys(file)] == ["bob"]


def test_a_key_may_expire_and_each_change_is_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, record = tmp_path / "keys.toml", tmp_path / "keys.toml.events.jsonl"
    end = "2099-01-31T00:00:00Z"
    assert main(["keys", "add", "guest", "--file", str(file), "--expires", end]) == 0
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert f"expires {end}" in capsys.readouterr().out
    file.write_text(file.read_text().replace("2099", "2020"))
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert "expired 2020-01-31T00:00:00Z" in capsys.readouterr().out
    before = record.read_bytes()
    assert main(["keys", "remove", "guest", "--file", str(file)]) == 0
    assert record.read_bytes().startswith(before)
    assert record.stat().st_mode & 0o777 == 0o600
    added, removed = read_events(record)
    assert added.text == f"added guest: no limits, expires {end}"
    assert removed.text == "removed guest"
    assert added.kind is removed.kind is EventKind.KEYS
    assert "@" in added.who


def test_a_change_that_cannot_be_put_on_record_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    (tmp_path / "keys.toml.events.jsonl").mkdir()
    assert main(["keys", "add", "guest", "--file", str(file)]) != 0
    shown = capsys.readouterr()
    assert shown.out.startswith(PREFIX)
    assert "nothing tells of this: added guest: no limits. It is done. Fix: " in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "carol", "--expires", "2020-01-31T00:00:00Z"], "is over. Fix: a time to come"),
        (["add", "carol", "--expires", "2099-01-31"], "has no time zone"),
        (["add", "carol", "--expires", "soon"], "is no time. Fix: a date, a time and a zone"),
        (["add", "bob"], "is in"),
        (["add", "a b"], "a word of logs"),
        (["add", "carol", "--rpm", "-1"], "is below 0"),
        (["remove", "carol"], "one of bob"),
    ],
)
def test_what_cannot_be_leaves_the_file_alone(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "add", "bob", "--file", str(file)]) == 0
    before = file.read_text()
    assert main(["keys", *words, "--file", str(file)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Fix: " in error
    assert file.read_text() == before


def test_a_key_is_made_for_what_it_is_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    assert main(["keys", "add", "ann", "--file", str(file)]) == 0
    rights = ["--right", "operations", "--right", "inference"]
    assert main(["keys", "add", "ops", "--file", str(file), *rights]) == 0
    found = {each.name: each.rights for each in read_keys(file)}
    both = frozenset({Right.INFERENCE, Right.OPERATIONS})
    assert found == {"ann": frozenset({Right.INFERENCE}), "ops": both}
    capsys.readouterr()
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert "for inference, operations" in capsys.readouterr().out
    file.write_text(file.read_text().replace('"operations"', '"everything"'))
    assert main(["keys", "list", "--file", str(file)]) == 2
    assert "keys.ops.rights = 'everything'" in capsys.readouterr().err


def test_metrics_that_need_a_key_need_keys(tmp_path: Path) -> None:
    config = ClusterConfig(router=RouterSection(metrics_access="key"))
    with pytest.raises(ConfigError, match=r"router\.metrics_access"):
        key_source(config, {})


def test_a_router_beyond_this_machine_needs_keys_or_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(SMALL)
    opened = ["validate", str(path), "--host", "0.0.0.0"]
    assert main(opened) == 2
    error = capsys.readouterr().err
    assert "router.allow_anonymous" in error
    assert "tandem keys add" in error
    assert main([*opened, "--set", "router.allow_anonymous=true"]) == 0
    assert "API keys" not in capsys.readouterr().out
    assert main(["keys", "add", "alice", "--file", str(tmp_path / "keys.toml")]) == 0
    path.write_text(f'{SMALL}[router]\nkeys_file = "keys.toml"\n')  # beside the configuration
    assert main(opened) == 0
    assert "API keys     1" in capsys.readouterr().out
    assert load_config(path).router.keys_file == str(tmp_path / "keys.toml")
    (tmp_path / "keys.toml").write_text("[keys")
    assert main(opened) == 2
    assert "router.keys_file" in capsys.readouterr().err


def test_a_key_of_a_tier_that_is_not_configured_is_refused_by_validate_and_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, keys = tmp_path / "cluster.toml", tmp_path / "keys.toml"
    tiers = '[[tiers]]\nname = "max"\n[[tiers]]\nname = "base"\norder = 1\n'
    path.write_text(f'{SMALL}[router]\nkeys_file = "keys.toml"\n{tiers}')
    assert main(["keys", "add", "bob", "--file", str(keys), "--tier", "base"]) == 0
    assert main(["validate", str(path)]) == 0
    assert "tiers.max: no request may have it" in capsys.readouterr().out
    assert main(["keys", "add", "dora", "--file", str(keys), "--tier", "max"]) == 0
    assert main(["validate", str(path)]) == 0
    assert "no request may have it" not in capsys.readouterr().out
    assert main(["keys", "add", "carol", "--file", str(keys), "--tier", "gold"]) == 0
    run_dir = f"cluster.run_dir={tmp_path / 'run'}"
    for command in (["validate", str(path)], ["up", str(path), "--set", run_dir]):
        capsys.readouterr()
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "keys.carol.tiers = 'gold'" in error
        assert "one of max, base" in error


def test_up_refuses_it_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = f"cluster.run_dir={tmp_path}"
    assert main(["up", "--host", "0.0.0.0", "--port", "0", "--set", run_dir]) == 2
    assert "router.allow_anonymous" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


def test_a_router_by_itself_refuses_it_too(tmp_path: Path) -> None:
    section = ClusterSection(host="0.0.0.0", advertise="localhost", secret="of tests")
    config = ClusterConfig(cluster=section, kv_transfer=KVTransferSection(transport="loopback"))
    for service in (
        lambda: RouterService(config, tmp_path / "cluster.toml"),
        lambda: HttpWorkerService(config, "127.0.0.1:1", 0),
    ):
        with pytest.raises(ConfigError, match=r"router\.allow_anonymous"):
            service()


def test_the_table_of_ports_says_that_keys_are_asked_for() -> None:
    config = ClusterConfig(
        router=RouterSection(host="0.0.0.0"), kv_transfer=KVTransferSection(transport="loopback")
    )
    without, with_keys = (posture_of(config, has_keys=each)[0] for each in (False, True))
    assert without.is_open
    assert "router.keys_file" in without.advice
    assert not with_keys.is_open
    assert with_keys.protection == "an API key but for /metrics; plain text"
    assert "tls.mode" in with_keys.advice
    router = dataclasses.replace(config.router, metrics_access="key")
    closed = posture_of(dataclasses.replace(config, router=router), has_keys=True)[0]
    assert closed.protection == "an API key; plain text"


def test_keys_of_the_environment_reach_routers_and_nobody_else(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    given = "ci=0123456789abcdef"
    context = dataclasses.replace(fake_context(config, tmp_path), api_keys=given)
    assert given not in repr(context)
    there = Places(ranks=(Place(bind="127.0.0.1"),), rendezvous="127.0.0.1:999")
    for plan in plan_instances(config):
        (spec,) = process_specs(plan, context, there)
        told = spec.env.get(KEYS_VARIABLE)
        assert told == (given if plan.role is Role.ROUTER else None)


def test_the_path_of_the_file_reaches_the_routers_process(tmp_path: Path) -> None:
    section = RouterSection(keys_file=str(tmp_path / "keys.toml"))
    text = dump_config(ClusterConfig(router=section))
    assert tomllib.loads(text)["router"]["keys_file"] == section.keys_file
