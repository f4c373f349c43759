"""Which keys are in force: those of the file as it is now, and those of the environment.

A file that changes is read again within seconds; one that cannot be used leaves the former keys in
force. A key is looked up by its SHA-256. How long that takes depends on the hash alone, which
nobody can steer towards that of a key they do not have, and what is found is compared in constant
time: no answer is sooner or later for a guess that is closer.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from router.keys.file import FIELD, check_distinct, read_keys
from router.keys.record import MAX_KEYS, KeyRecord, Right, check_name, hash_key, parse_right
from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.logging import get_logger
from runtime.net.credentials import is_loopback
from runtime.rpc.renewal import Renewed

logger = get_logger(__name__)

KEYS_VARIABLE = "TANDEM_API_KEYS"
MIN_LENGTH = 16
"""Of a key in the environment, in characters; its owner vouches that they are random."""


class Keyring:
    """Keys that are in force together."""

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        """``records`` have different names and different hashes."""
        self._by_hash = {record.sha256: record for record in records}
        self._by_name = {record.name: record for record in self._by_hash.values()}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._by_hash)

    @property
    def num_operators(self) -> int:
        """How many may look at the cluster."""
        return sum(record.may(Right.OPERATIONS) for record in self._by_hash.values())

    @property
    def by_name(self) -> Mapping[str, KeyRecord]:
        """All of them."""
        return self._by_name

    @property
    def names(self) -> frozenset[str]:
        """Of all keys."""
        return frozenset(record.name for record in self._by_hash.values())

    def changed_since(self, former: Keyring) -> str:
        """How these differ from the ``former`` ones, for a line of a log."""
        now, before = self.by_name, former.by_name
        changed = [name for name in now.keys() & before.keys() if now[name] != before[name]]
        names = {"added": now.keys() - before.keys(), "removed": before.keys() - now.keys()}
        told = [*names.items(), ("changed", changed)]
        return " ".join(f"{what}={','.join(sorted(which)) or '-'}" for what, which in told)

    def find(self, key: str) -> KeyRecord | None:
        """Whose ``key`` is; None: nobody's."""
        digest = hash_key(key)
        record = self._by_hash.get(digest)
        if record is None or not hmac.compare_digest(record.sha256, digest):
            return None
        return record


class KeySource:
    """The keys in force, followed while their file changes."""

    def __init__(
        self, keys_file: str, given: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``given`` are keys as TANDEM_API_KEYS has them; with ``keys_file`` "" they are all.

        Raises:
            ConfigError: the file cannot be used, or ``given`` is not of that form.
        """
        self._given = parse_given(given)
        self._paths = (keys_file,) if keys_file else ()
        self._renewed = Renewed(self._paths, self._read, clock, what="list of API keys")

    @property
    def is_stale(self) -> bool:
        """Whether the file has changed, and cannot be used."""
        return self._renewed.is_stale

    def current(self) -> Keyring:
        """The keys that are in force now."""
        return self._renewed.current()

    def _read(self) -> Keyring:
        records = self._given + tuple(
            record for path in self._paths for record in read_keys(Path(path))
        )
        check_distinct(records)
        if len(records) > MAX_KEYS:
            fix = f"at most {MAX_KEYS}"
            raise ConfigError(FIELD, self._paths, f"{len(records)} keys in all", fix)
        return Keyring(records)


def parse_given(text: str) -> tuple[KeyRecord, ...]:
    """The keys in ``NAME=KEY,NAME:RIGHT=KEY``; none in "".

    Raises:
        ConfigError: it is not of that form, or a key is short; keys are not repeated.
    """
    records = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        title, equals, key = part.partition("=")
        name, colon, right = title.partition(":")
        if not equals:
            problem, fix = "has a part without a name", f"{KEYS_VARIABLE}=NAME=KEY,NAME=KEY"
            raise ConfigError(KEYS_VARIABLE, "...", problem, fix)
        check_name(name, KEYS_VARIABLE)
        if len(key) < MIN_LENGTH:
            problem = f"the key of {name!r} has {len(key)} characters and could be guessed"
            fix = f"{MIN_LENGTH} or more that are random, as `openssl rand -hex 24` makes them"
            raise ConfigError(KEYS_VARIABLE, "...", problem, fix)
        rights = {parse_right(right, KEYS_VARIABLE)} if colon else {Right.INFERENCE}
        records.append(KeyRecord(name=name, sha256=hash_key(key), rights=frozenset(rights)))
    check_distinct(tuple(records))
    return tuple(records)


def asks_for_keys(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether requests need a key."""
    return bool(config.router.keys_file or environ.get(KEYS_VARIABLE))


def key_source(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> KeySource | None:
    """The keys that ``config`` and the environment ask for; None: no key is asked for.

    Raises:
        ConfigError: they cannot be used; or HTTP would listen beyond this machine, ask nobody for
            anything, and ``router.allow_anonymous`` does not say that this is meant.
    """
    router, given = config.router, environ.get(KEYS_VARIABLE, "")
    if asks_for_keys(config, environ):
        if router.allow_anonymous:
            problem = f"{KEYS_VARIABLE} is set: every request needs a key"
            raise ConfigError("router.allow_anonymous", True, problem, "one of the two")
        return KeySource(router.keys_file, given)
    if router.metrics_access == "key":
        problem = "there are no keys, so nobody could read them"
        fix = 'router.keys_file with a key that has the right metrics, or "open"'
        raise ConfigError("router.metrics_access", "key", problem, fix)
    asks_for_certificates = config.tls.mode != "off" and config.tls.http_mutual
    if is_loopback(config.http_host) or asks_for_certificates or router.allow_anonymous:
        return None
    problem = f"HTTP listens on {config.http_host}, beyond this machine, and asks nobody for a key"
    fix = (
        "keys (`tandem keys add NAME --file FILE`, then router.keys_file = FILE), or "
        "router.allow_anonymous = true where a gateway or the network keeps strangers out"
    )
    raise ConfigError("router.allow_anonymous", False, problem, fix)
