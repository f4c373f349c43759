"""What a process is in its cluster, what it may ask of the others, and the secrets that prove it.

``CALLERS`` has every call that a server offers and who may make it; what is not there is for
nobody. A caller proves its role by its secret and, with TLS on both ends, by its certificate.

The secret that callers of role A show to servers of role B is made of B's own, and B's own of the
cluster's. So a process can do with ``role_secret`` alone, from which the cluster's cannot be found:
it can check who calls it, and can call whom its role may call. What it is shown is good for servers
of its own role and for no other, whoever shows it.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from runtime.errors import ConfigError


class Role(enum.StrEnum):
    """Of a process, towards the others of its cluster."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    CONTROLLER = "controller"
    """Of `tandem up`, and of the commands of who runs the cluster."""


Roles = frozenset[Role]

_ROUTER = frozenset({Role.ROUTER})
_PREFILL = frozenset({Role.PREFILL})
_DECODE = frozenset({Role.DECODE})
_CONTROLLER = frozenset({Role.CONTROLLER})
_WORKERS = _PREFILL | _DECODE

ALL_ROLES: Roles = frozenset(Role)
SERVERS: Mapping[str, Roles] = {
    "Registry": _ROUTER,
    "Keys": _ROUTER,
    "Http": _ROUTER,
    "Prefill": _PREFILL,
    "Decode": _DECODE,
    "Cache": _WORKERS,
    "Experts": _WORKERS,
    "Kv": _WORKERS,
    "Controller": _CONTROLLER,
}
"""By the name of a service: who offers it."""
CALLERS: Mapping[str, Mapping[str, Roles]] = {
    "Registry": {
        "Register": _WORKERS,  # as its own role
        "Renew": _WORKERS,
        "Deregister": _WORKERS,
        "Watch": _ROUTER | _CONTROLLER,
    },
    "Keys": {"Admit": _ROUTER, "Settle": _ROUTER, "Spend": _ROUTER},
    "Http": {"look": _CONTROLLER},  # what needs a key with the right operations of others
    "Prefill": {"Run": _ROUTER, "Revoke": _DECODE, "Drain": _CONTROLLER},
    "Decode": {
        "Reserve": _ROUTER,
        "Claim": _PREFILL,
        "RenewTickets": _PREFILL,
        "CloseTickets": _PREFILL,
        "Abort": _ROUTER,
        "Frames": _ROUTER,
        "Drain": _CONTROLLER,
    },
    "Cache": {"Follow": _ROUTER},
    "Experts": {"Record": _ROUTER | _CONTROLLER},
    "Kv": {"connect": _WORKERS},  # with a token besides, that the receiver has handed out
    "Controller": dict.fromkeys(
        ("Scale", "Drain", "Restart", "Apply", "Events", "ReadLog"), _CONTROLLER
    ),
}
"""By service and method: whose calls are answered."""

URI = "urn:tandem:role:"
"""A certificate names a role by this and its name, a URI among its subject alternative names."""
_FORM = re.compile(r"(?P<role>[a-z]+)(/(accepts|[a-z]+)=[0-9a-f]{64})+")


def refusal(service: str, method: str, roles: Roles) -> str:
    """Why somebody of these ``roles`` may not make that call; empty: they may."""
    allowed = CALLERS.get(service, {}).get(method, frozenset())
    if roles & allowed:
        return ""
    return f"{service}.{method} is for {_told(allowed)}, and the caller is {_told(roles)}"


def roles_of_names(uris: Iterable[str]) -> Roles:
    """The roles that a certificate names; one that names none stands for all."""
    named = [uri.removeprefix(URI) for uri in uris if uri.startswith(URI)]
    return frozenset(role for role in Role if role in named) if named else ALL_ROLES


def role_secret(secret: str, role: Role) -> str:
    """All that a process of ``role`` needs of the cluster's ``secret``, as a secret of its own.

    One that is a role's already is given back.

    Raises:
        ConfigError: it is another role's.
    """
    given = _parts_of(secret)
    if given is not None:
        _check_role(given[0], role)
        return secret
    shown = {server: _shown(_own(secret, server), role) for server in _callees(role)}
    parts = [f"{role}", f"accepts={_own(secret, role)}"]
    return "/".join([*parts, *(f"{server}={token}" for server, token in shown.items())])


def shown_to(secret: str, role: Role, server: Role) -> str:
    """What a process of ``role`` shows to one of the role ``server``.

    Raises:
        ConfigError: ``secret`` is another role's.
    """
    given = _parts_of(secret)
    if given is None:
        return _shown(_own(secret, server), role)
    _check_role(given[0], role)
    # Nobody accepts the empty one.
    return given[1].get(server.value, "")


def accepting_key(secret: str, role: Role) -> str:
    """What all processes of ``role``, and those that have the cluster's secret, have in common.

    Raises:
        ConfigError: ``secret`` is another role's.
    """
    given = _parts_of(secret)
    if given is None:
        return _own(secret, role)
    _check_role(given[0], role)
    return given[1]["accepts"]


@lru_cache(maxsize=64)
def accepted_by(secret: str, role: Role | None) -> tuple[tuple[bytes, Roles], ...]:
    """What a process of ``role`` accepts of callers, and whose each is.

    The cluster's secret itself is everybody's; None: a server of every role.
    """
    given = _parts_of(secret)
    servers = list(Role) if role is None else [role]
    if given is not None:
        servers = [Role(given[0])]
        if role is not None:
            _check_role(given[0], role)
    accepted = [] if given is not None else [(secret.encode(), ALL_ROLES)]
    for server in servers:
        key = accepting_key(secret, server)
        accepted += [(_shown(key, caller).encode(), frozenset({caller})) for caller in Role]
    return tuple(accepted)


def roles_of_secret(given: bytes, accepted: Iterable[tuple[bytes, Roles]]) -> Roles:
    """Whose ``given`` is; nobody's is empty, after the same time for every wrong one."""
    found: Roles = frozenset()
    for secret, roles in accepted:
        if hmac.compare_digest(given, secret):
            found |= roles
    return found


def _callees(role: Role) -> list[Role]:
    """Whom processes of ``role`` call, in order."""
    called = {
        server
        for service, methods in CALLERS.items()
        for callers in methods.values()
        if role in callers
        for server in SERVERS[service]
    }
    return [server for server in Role if server in called]


def _parts_of(secret: str) -> tuple[str, dict[str, str]] | None:
    """The role and the parts of a ``role_secret``; None: it is a cluster's."""
    if not _FORM.fullmatch(secret):
        return None
    role, *parts = secret.split("/")
    if role not in list(Role):
        return None
    return role, dict(part.split("=") for part in parts)


def _check_role(found: str, role: Role) -> None:
    if found != role:
        problem = f"is the secret of role {found}, and this is of role {role}"
        fix = f"what `tandem secret {role}` prints, or the cluster's own"
        raise ConfigError("cluster.secret", "...", problem, fix)


# Such that a chart can do the same, which has no HMAC. What is secret comes last and is all that
# is not known, so nothing can be put behind it to make another one.


def _own(secret: str, server: Role) -> str:
    return _hash(f"tandem accepts {server}\n{secret}")


def _shown(accepts: str, caller: Role) -> str:
    return _hash(f"tandem shows {caller}\n{accepts}")


def derived(secret: str, use: str) -> str:
    """A secret for another ``use``, from which the cluster's cannot be found."""
    return _hash(f"tandem uses {use}\n{secret}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _told(roles: Roles) -> str:
    return " and ".join(role for role in Role if role in roles) or "nobody"
