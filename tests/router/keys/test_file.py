"""The file of keys: what it may say, what is refused, and how a command changes it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.file import add_to_file, parse_keys, read_keys, remove_from_file
from router.keys.record import (
    MAX_KEYS,
    PREFIX,
    KeyLimits,
    KeyRecord,
    hash_key,
    new_key,
    salt_of_tenant,
)
from runtime.errors import ConfigError

HASH = "0" * 64
OFFSETS = st.integers(-840, 840).map(lambda minutes: timezone(timedelta(minutes=minutes)))
OTHER = "1" * 64
ALICE = KeyRecord(
    name="alice",
    sha256=HASH,
    models=("org/model", 'a "quoted" one'),
    cache_salt="team",
    limits=KeyLimits(requests_per_minute=60, tokens_per_minute=9000, max_concurrent_requests=3),
)
BOB = KeyRecord(name="bob", sha256=OTHER)


def test_what_a_command_writes_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_to_file(path, ALICE)
    add_to_file(path, BOB)
    assert read_keys(path) == (ALICE, BOB)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "2027-01-31T00:00:00",
            r"keys.a.expires = '2027-01-31T00:00:00': has no time zone. Fix: .*Z",
        ),
        ("2027-01-31", r"keys.a.expires = .* is a date. Fix: .*2027-01-31T00:00:00Z"),
        ('"2027-01-31T00:00:00Z"', r"keys.a.expires = .* is a str. Fix: .*not quoted"),
    ],
)
def test_an_end_is_a_moment(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_keys(f'[keys.a]\nsha256 = "{HASH}"\nexpires = {text}\n', "keys.toml")


@given(st.datetimes(timezones=OFFSETS), st.integers(-(10**5), 10**5))
def test_an_end_is_written_as_it_is_meant(
    tmp_path_factory: pytest.TempPathFactory, expires: datetime, later_s: int
) -> None:
    if not datetime(1970, 1, 2, tzinfo=UTC) < expires < datetime(9000, 1, 1, tzinfo=UTC):
        return
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    add_to_file(path, replace(BOB, expires=expires))
    [found] = read_keys(path)
    assert found.expires == expires
    assert found.has_expired(expires.timestamp() + later_s) is (later_s >= 0)
    assert not BOB.has_expired(later_s)


def test_lines_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'# of the team\n[keys.bob]\nsha256 = "{OTHER}"  # until June\n')
    path.chmod(0o640)
    add_to_file(path, ALICE)
    remove_from_file(path, "alice")
    assert read_keys(path) == (BOB,)
    text = path.read_text()
    assert "# of the team" in text
    assert "# until June" in text
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_last_key_can_be_removed(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.bob]\nsha256 = "{OTHER}"\n')
    remove_from_file(path, "bob")
    assert read_keys(path) == ()


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "keys.toml", tmp_path / "link.toml"
    add_to_file(path, BOB)
    link.symlink_to(path)
    add_to_file(link, ALICE)
    assert link.is_symlink()
    assert read_keys(path) == (BOB, ALICE)


def test_a_file_in_another_form_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text := f'keys = {{bob = {{sha256 = "{OTHER}"}}}}\n')
    assert read_keys(path) == (BOB,)
    for change in (lambda: add_to_file(path, ALICE), lambda: remove_from_file(path, "bob")):
        with pytest.raises(ConfigError, match="by hand"):
            change()
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no table"),
        ("[keys", "no valid TOML"),
        (f"[keys]\na = {'[' * 100_000}", "no valid TOML: nested too deep"),
        ("keys = 3", "has no table"),
        ("[other]", "'other' at its top"),
        ("[keys]\nbob = 3", "keys.bob"),
        ("[keys.bob]", "keys.bob.sha256"),
        ('[keys.bob]\nsha256 = "sk-tandem-oops"', "keys.bob.sha256"),
        (f'[keys."b b"]\nsha256 = "{HASH}"', "'b b'"),
        (f'[keys.bob]\nsha256 = "{HASH}"\nrpm = 3', "keys.bob.rpm"),
        (f'[keys.bob]\nsha256 = "{HASH}"\nrequests_per_minute = -1', "is below 0"),
        (f'[keys.bob]\nsha256 = "{HASH}"\nrequests_per_minute = 1.5', "is a float"),
        (f'[keys.bob]\nsha256 = "{HASH}"\nmodels = [3]', "keys.bob.models"),
        (f'[keys.bob]\nsha256 = "{HASH}"\ncache_salt = "a b"', "keys.bob.cache_salt"),
        (f'[keys.a]\nsha256 = "{HASH}"\n[keys.b]\nsha256 = "{HASH}"', "is the key of 'a', too"),
        ("\n".join(f'[keys.k{i}]\nsha256 = "{i:064x}"' for i in range(MAX_KEYS + 1)), "at most"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused_with_the_field_and_the_fix(
    text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "keys.toml")
    assert message in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert "oops" not in str(caught.value)


def test_names_are_taken_once_and_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    add_to_file(path, BOB)
    with pytest.raises(ConfigError, match=r"is in .* already"):
        add_to_file(path, KeyRecord(name="bob", sha256=HASH))
    with pytest.raises(ConfigError, match="one of bob"):
        remove_from_file(path, "alice")
    with pytest.raises(ConfigError, match="readable file"):
        read_keys(tmp_path / "none.toml")


def test_keys_are_long_random_and_different() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == len({hash_key(key) for key in keys}) == 100
    assert all(key.startswith(PREFIX) and len(key) == len(PREFIX) + 43 for key in keys)


TENANTS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", fullmatch=True) | st.just("")


@given(TENANTS, st.text(max_size=8), TENANTS, st.text(max_size=8))
def test_tenants_share_a_salt_only_with_themselves(
    tenant: str, salt: str, other: str, other_salt: str
) -> None:
    same = salt_of_tenant(tenant, salt) == salt_of_tenant(other, other_salt)
    assert same == ((tenant, salt) == (other, other_salt))
