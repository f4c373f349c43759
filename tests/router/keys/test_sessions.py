"""Sessions: whose they are, when they end, and that nobody else can make one."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.record import KeyRecord, hash_key
from router.keys.sessions import SESSION_S, Sessions
from router.keys.source import Keyring

ALICE, BOB = (KeyRecord(name=name, sha256=hash_key(name)) for name in ("alice", "bob"))
KEYS = Keyring([ALICE, BOB])


class Clock:
    now = 1_000_000.5

    def __call__(self) -> float:
        return self.now


def test_a_session_is_its_owners_until_it_ends() -> None:
    clock = Clock()
    sessions = Sessions("secret", clock)
    session = sessions.begin(ALICE)
    assert sessions.owner(session, KEYS) is ALICE
    assert Sessions("secret", clock).owner(session, KEYS) is ALICE  # another process
    clock.now += SESSION_S - 2
    assert sessions.owner(session, KEYS) is ALICE
    clock.now += 2
    assert sessions.owner(session, KEYS) is None


def test_it_ends_with_its_key_and_with_the_secret() -> None:
    clock = Clock()
    sessions = Sessions("secret", clock)
    session = sessions.begin(ALICE)
    assert sessions.owner(session, Keyring([BOB])) is None
    renewed = KeyRecord(name="alice", sha256=hash_key("another key of the same name"))
    assert sessions.owner(session, Keyring([renewed])) is None
    assert Sessions("another", clock).owner(session, KEYS) is None


@pytest.mark.parametrize("shares", [False, True])
def test_one_that_was_ended_is_nobodys_in_all_processes(tmp_path: Path, shares: bool) -> None:
    clock = Clock()
    clock.now = time.time()
    folder = tmp_path if shares else None
    first = Sessions("secret", clock, folder)
    other = Sessions("secret", clock, folder) if shares else first
    mine, another = first.begin(ALICE), first.begin(ALICE)
    assert mine != another
    other.end(mine, KEYS)
    other.end("nonsense", KEYS)
    other.end(mine + "0", KEYS)
    for sessions in (first, other):
        assert sessions.owner(mine, KEYS) is None
        assert sessions.owner(another, KEYS) is ALICE
    assert len(list(tmp_path.iterdir())) == shares
    clock.now += 2 * SESSION_S  # what was ended is forgotten when it would have ended anyway
    first.end(first.begin(ALICE), KEYS)
    assert len(list(tmp_path.iterdir())) == shares
    assert len(first._ended) == 1


def test_it_ends_no_later_than_its_key() -> None:
    clock = Clock()
    expires = datetime.fromtimestamp(clock.now + 60, UTC)
    short = replace(ALICE, expires=expires)
    sessions = Sessions("secret", clock)
    session = sessions.begin(short)
    assert sessions.owner(session, Keyring([short])) is short
    clock.now += 60
    assert sessions.owner(session, Keyring([short])) is None


@given(st.integers(0, 200), st.characters(max_codepoint=255))
def test_no_character_of_it_can_be_changed(position: int, character: str) -> None:
    sessions = Sessions("secret", Clock())
    session = sessions.begin(ALICE)
    position %= len(session)
    changed = session[:position] + character + session[position + 1 :]
    if changed != session:
        assert sessions.owner(changed, KEYS) is None


@pytest.mark.parametrize(
    "text", ["", ".", "..", "1.alice", "x.alice.00", "\u0663.alice.00", "1.\udcff.0"]
)
def test_what_is_no_session_is_nobodys(text: str) -> None:
    assert Sessions("secret", Clock()).owner(text, KEYS) is None
