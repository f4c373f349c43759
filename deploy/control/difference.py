"""What differs between two configurations, field by field, and what each difference takes.

A cluster that runs takes on most settings by restarting the instances of a role one after the
other. Some it cannot: workers of both sides have to agree on them at every moment, or they name
the cluster. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from deploy.errors import WrongArgumentError
from deploy.plan import Role
from runtime.config import ClusterConfig
from runtime.errors import ConfigError

_NEW_RUN = "`tandem down`, then `tandem up` with this file"
_SECOND = (
    "a second cluster with another cluster.name and ports, then move the clients; or " + _NEW_RUN
)
_BOTH_SIDES = (
    "cannot change while the cluster runs: prefill and decode have to agree on it at every moment"
)
_IDENTITY = "cannot change while the cluster runs: all processes find each other by it"
_OTHER_MODEL = "cannot change while the cluster runs: one pool serves one model"

_FIXED: dict[str, tuple[str, str]] = {
    "cluster": (_IDENTITY, _NEW_RUN),
    "tls": (_IDENTITY, _NEW_RUN),
    "model": (_OTHER_MODEL, _SECOND),
    "router.host": (_IDENTITY, _NEW_RUN),
    "router.port": (_IDENTITY, _NEW_RUN),
    "router.control_port": (_IDENTITY, _NEW_RUN),
    "router.instances": (_IDENTITY, _NEW_RUN),
    "prefill.block_size": (_BOTH_SIDES, _SECOND),
    "prefill.kv_dtype": (_BOTH_SIDES, _SECOND),
    "decode.block_size": (_BOTH_SIDES, _SECOND),
    "decode.kv_dtype": (_BOTH_SIDES, _SECOND),
    "kv_transfer.transport": (_BOTH_SIDES, _SECOND),
}
"""What is wrong with a change, and the fix; by field, else by section."""

_ROLLED: dict[str, tuple[Role, ...]] = {
    "router": (Role.ROUTER,),
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE,),
    "kv_transfer": (Role.PREFILL, Role.DECODE),
    "tiers": (Role.ROUTER,),
    "tracing": tuple(Role),
}
"""Whose processes read a section."""

_DRAFTS = "decode.num_speculative_tokens"
"""Both roles agree on whether there are any, as prefill has their layer, too; not on how many."""

_AT_NEXT_START = frozenset({"cluster.boot_timeout_s"})
_SCALED = {"prefill.instances": Role.PREFILL, "decode.instances": Role.DECODE}
_SECRETS = frozenset({"cluster.secret", "cluster.previous_secret"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One field that differs."""

    field: str
    old: object
    new: object
    effect: str
    """What it takes, for people."""
    rolls: frozenset[Role] = frozenset()
    """Roles that are restarted one after the other."""
    scales: Role | None = None
    problem: ConfigError | None = None
    """Why a cluster that runs cannot take it on."""


def difference(old: ClusterConfig, new: ClusterConfig) -> tuple[FieldChange, ...]:
    """What differs, in the order of the file; secrets are not compared."""
    return tuple(_changes(old, new))


def rolled_roles(changes: Iterable[FieldChange]) -> frozenset[Role]:
    """All roles that ``changes`` restart."""
    return frozenset().union(*(change.rolls for change in changes))


def check_can_change(changes: Iterable[FieldChange]) -> None:
    """Refuse what a running cluster cannot take on.

    Raises:
        WrongArgumentError: names every such field, with its fix.
    """
    problems = [change.problem for change in changes if change.problem is not None]
    if problems:
        raise WrongArgumentError("\n".join(map(str, problems)))


def _changes(old: ClusterConfig, new: ClusterConfig) -> Iterator[FieldChange]:
    for section_field in dataclasses.fields(ClusterConfig):
        section = section_field.name
        former, latter = getattr(old, section), getattr(new, section)
        if isinstance(former, tuple):
            if former != latter:
                yield _change(section, former, latter)
            continue
        for item in dataclasses.fields(former):
            path = f"{section}.{item.name}"
            was, becomes = getattr(former, item.name), getattr(latter, item.name)
            if was != becomes and path not in _SECRETS:
                yield _change(path, was, becomes)


def _change(path: str, old: object, new: object) -> FieldChange:
    section = path.partition(".")[0]
    if path in _SCALED:
        role = _SCALED[path]
        effect = f"scale {role.value}"
        return FieldChange(field=path, old=old, new=new, effect=effect, scales=role)
    if path in _AT_NEXT_START:
        effect = "none now; read by every worker that starts"
        return FieldChange(field=path, old=old, new=new, effect=effect)
    fixed = _FIXED.get(path) or (_FIXED.get(section) if section not in _ROLLED else None)
    if path == _DRAFTS and 0 in (old, new):
        fixed = _BOTH_SIDES, f"{old!r}, as it runs; or {_SECOND}"
    if fixed is not None:
        problem, fix = fixed
        error = ConfigError(path, new, f"is {old!r} in the cluster that runs, and {problem}", fix)
        return FieldChange(field=path, old=old, new=new, effect="cannot change", problem=error)
    roles = _ROLLED[section]
    names = " and ".join(role.value for role in roles)
    return FieldChange(
        field=path,
        old=old,
        new=new,
        effect=f"rolling restart of {names}",
        rolls=frozenset(roles),
    )
