"""Where keys come from, and when a router without any is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.keys.file import add_to_file, remove_from_file
from router.keys.record import KeyRecord, hash_key, new_key
from router.keys.source import KEYS_VARIABLE, KeySource, key_source, parse_given
from runtime.config import ClusterConfig, ClusterSection, RouterSection, TlsSection
from runtime.errors import ConfigError
from runtime.rpc.renewal import CHECK_S

LONG = "0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_key_is_found_by_itself_and_by_nothing_else(tmp_path: Path) -> None:
    key, path = new_key(), tmp_path / "keys.toml"
    add_to_file(path, KeyRecord(name="alice", sha256=hash_key(key)))
    keys = KeySource(str(path)).current()
    found = keys.find(key)
    assert found is not None
    assert found.name == "alice"
    for other in ("", key[:-1], key + " ", key.upper(), hash_key(key), "\udcff"):
        assert keys.find(other) is None, other


def test_a_file_is_followed_until_it_cannot_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "keys.toml"
    for name, digest in (("alice", "0" * 64), ("bob", "1" * 64)):
        add_to_file(path, KeyRecord(name=name, sha256=digest))
    source = KeySource(str(path), clock=clock)

    def names() -> set[str]:
        clock.now += CHECK_S
        return set(source.current().names)

    remove_from_file(path, "alice")
    assert names() == {"bob"}
    whole = path.read_text()
    for broken in (whole + "[keys.carol", "", whole.replace("1111", "zzzz"), None):
        path.unlink() if broken is None else path.write_text(broken)
        caplog.clear()
        for _ in range(3):
            assert names() == {"bob"}
            assert source.is_stale
        told = [each for each in caplog.messages if "the former list of API keys stays" in each]
        assert len(told) == 1, broken
    path.write_text(whole)
    assert names() == {"bob"}
    assert not source.is_stale
    remove_from_file(path, "bob")
    assert names() == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LONG, "without a name"),
        ("a b=" + LONG, "'a b'"),
        ("alice=short", "5 characters"),
        (f"alice={LONG},alice={LONG}x", "the name of two keys"),
        (f"alice={LONG},bob={LONG}", "the key of 'alice', too"),
    ],
)
def test_an_environment_that_cannot_be_is_refused_without_its_keys(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_given(text)
    assert message in str(caught.value)
    assert LONG not in str(caught.value)


def test_a_name_of_the_file_is_not_one_of_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_to_file(path, KeyRecord(name="alice", sha256="0" * 64))
    with pytest.raises(ConfigError, match="name of two keys"):
        KeySource(str(path), f"alice={LONG}")


BEYOND = ClusterSection(host="10.0.0.5")
MUTUAL = TlsSection(mode="auto", http_mutual=True)


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(),
        ClusterConfig(cluster=BEYOND, router=RouterSection(host="127.0.0.1")),
        ClusterConfig(cluster=BEYOND, router=RouterSection(allow_anonymous=True)),
        ClusterConfig(cluster=BEYOND, tls=MUTUAL),
    ],
)
def test_nobody_is_asked_where_strangers_do_not_come_or_are_meant(config: ClusterConfig) -> None:
    assert key_source(config, {}) is None


@pytest.mark.parametrize(
    "config",
    [
        ClusterConfig(cluster=BEYOND),
        ClusterConfig(router=RouterSection(host="0.0.0.0")),
        ClusterConfig(router=RouterSection(host="::")),
        ClusterConfig(cluster=BEYOND, tls=TlsSection(mode="auto")),
        ClusterConfig(cluster=BEYOND, tls=TlsSection(http_mutual=True)),
    ],
)
def test_a_router_beyond_this_machine_without_keys_is_refused(config: ClusterConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        key_source(config, {})
    assert caught.value.path == "router.allow_anonymous"
    assert "tandem keys add" in caught.value.fix
    with_key = key_source(config, {KEYS_VARIABLE: f"ci={LONG}"})
    assert with_key is not None
    assert with_key.current().names == {"ci"}


def test_keys_and_no_keys_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        RouterSection(keys_file="keys.toml", allow_anonymous=True)
    config = ClusterConfig(router=RouterSection(allow_anonymous=True))
    with pytest.raises(ConfigError, match="one of the two"):
        key_source(config, {KEYS_VARIABLE: f"ci={LONG}"})
    missing = ClusterConfig(router=RouterSection(keys_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"router\.keys_file"):
        key_source(missing, {})
