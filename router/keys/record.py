"""One API key as the router knows it: a name, a hash, and what its owner may do.

A key is 32 random bytes, so its plain SHA-256 is as good as it gets: there is nothing to guess, and
so nothing that a slow hash or a salt would make harder. That holds for random keys only; a word
that a person chose has no place here.
"""

from __future__ import annotations

import enum
import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from runtime.errors import ConfigError

LEAST_OUTPUT = 256
"""Tokens that an answer of unknown length is taken for at least."""
PREFIX = "sk-tandem-"
RANDOM_BYTES = 32
MAX_KEYS = 1000
"""In force at once: each is a label of metrics."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """How much a key may ask for; 0: as much as it likes."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and outputs together."""
    max_concurrent_requests: int = 0
    """From a request's admission to the end of its answer, queues included."""

    @property
    def most_at_once(self) -> int:
        """Requests that may run at once; 0: as many as it likes.

        Where tokens alone are limited: as many as a minute's tokens are answers of LEAST_OUTPUT.
        All of them may turn out to be long, and the debt is the larger the more there are.
        """
        if self.max_concurrent_requests or not self.tokens_per_minute:
            return self.max_concurrent_requests
        return max(1, self.tokens_per_minute // LEAST_OUTPUT)

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing has to be counted before a request is let in."""
        return self == KeyLimits()


class Right(enum.Enum):
    """What a key is for; the values stand in files."""

    INFERENCE = "inference"
    """Asking the model, and what is told about it."""
    METRICS = "metrics"
    """``/metrics`` and ``/targets``, where they need a key."""
    OPERATIONS = "operations"
    """``/status`` and the console, and all of METRICS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One key of a file or of the environment."""

    name: str
    """Of its owner, as logs and metrics say it."""
    sha256: str = field(repr=False)
    """Of the key's UTF-8 bytes: 64 lower-case hexadecimal digits."""
    models: tuple[str, ...] = ()
    """Names of models that it may use; empty: all."""
    cache_salt: str = ""
    """Keys with the same one share cached prefixes; empty: the key's own name."""
    tiers: tuple[str, ...] = ()
    """Names of tiers of service that it may have; empty: those that are open, and ``tier``."""
    tier: str = ""
    """Of its requests that name none; empty: the cluster's default, or the last of ``tiers``."""
    limits: KeyLimits = field(default_factory=KeyLimits)
    rights: frozenset[Right] = frozenset({Right.INFERENCE})
    expires: datetime | None = None
    """From when on it is good for nothing, with a time zone; None: never."""

    def __post_init__(self) -> None:
        check_name(self.name)
        where = f"keys.{self.name}"
        if not _HASH.fullmatch(self.sha256):
            problem = "is no SHA-256 in hexadecimal"
            fix = "what `tandem keys add` writes: 64 digits of 0-9a-f, of the key and not the key"
            # Whoever wrote the key itself here must not find it in a log.
            raise ConfigError(f"{where}.sha256", "...", problem, fix)
        if self.cache_salt and not _NAME.fullmatch(self.cache_salt):
            raise _bad_name(f"{where}.cache_salt", self.cache_salt)
        if self.tier and self.tiers and self.tier not in self.tiers:
            problem = f"is none of {where}.tiers"
            raise ConfigError(
                f"{where}.tier", self.tier, problem, f"one of {', '.join(self.tiers)}"
            )
        if self.expires is not None and self.expires.tzinfo is None:
            problem, fix = "has no time zone", f"{self.expires.isoformat()}Z, if UTC is meant"
            raise ConfigError(f"{where}.expires", self.expires.isoformat(), problem, fix)
        if not self.rights:
            fix = f"one or more of {', '.join(right.value for right in Right)}"
            raise ConfigError(f"{where}.rights", [], "the key would be good for nothing", fix)
        for name in ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests"):
            value = getattr(self.limits, name)
            if value < 0:
                raise ConfigError(f"{where}.{name}", value, "is below 0", "1 or more; 0: no limit")

    @property
    def tenant(self) -> str:
        """Whose cached prefixes it uses; never empty."""
        return self.cache_salt or self.name

    def has_expired(self, now: float) -> bool:
        """Whether it is over at ``now``, in seconds since 1970."""
        return self.expires is not None and now >= self.expires.timestamp()

    @property
    def end(self) -> str:
        """When it expires, in UTC and as RFC 3339 has it; empty: never."""
        if self.expires is None:
            return ""
        return f"{self.expires.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"

    def may(self, right: Right) -> bool:
        """Whether it has ``right``, or one that contains it."""
        contained = right is Right.METRICS and Right.OPERATIONS in self.rights
        return right in self.rights or contained

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether requests of this key may ask for the model of these ``names``."""
        return not self.models or not set(self.models).isdisjoint(names)


def parse_right(text: object, path: str) -> Right:
    """The right of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Right(text)
    except ValueError as error:
        fix = f"one of {', '.join(right.value for right in Right)}"
        raise ConfigError(path, text, "is no right of a key", fix) from error


def check_name(name: str, path: str = "keys") -> None:
    """Refuse what is no name of a key.

    Raises:
        ConfigError: says what is.
    """
    if not _NAME.fullmatch(name):
        raise _bad_name(path, name)


def _bad_name(path: str, name: str) -> ConfigError:
    fix = "1 to 63 letters, digits, '_' or '-', a letter or digit first"
    return ConfigError(path, name, "is a label of metrics and a word of logs", fix)


def new_key() -> str:
    """A key that nobody has: 32 random bytes in the URL's alphabet behind a prefix."""
    return PREFIX + secrets.token_urlsafe(RANDOM_BYTES)


def hash_key(key: str) -> str:
    """What is kept of ``key``; a header's odd bytes come as surrogates."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def salt_of_tenant(tenant: str, salt: str) -> str:
    """The salt of a request's block hashes: of ``tenant`` ("" without keys) and the client's own.

    Two tenants never get the same one whatever clients send: a tenant's name has no NUL in it, so
    the first NUL ends it. Requests without either keep the empty salt.
    """
    return f"{tenant}\0{salt}" if tenant or salt else ""
