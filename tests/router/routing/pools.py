"""Pools for tests of routing: members as the registry announces them, under a clock that is set."""

from __future__ import annotations

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import PoolView


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def endpoint(role: Role, number: int, **change: object) -> Member:
    """Instance ``number`` of a role, of one rank."""
    options: dict[str, object] = {
        "key": WorkerKey(f"{role.value}-{number}", 1, 0),
        "role": role,
        "address": f"127.0.0.1:{number + 1}",
        "num_ranks": 1,
        "model": "m",
        "max_model_len": 100,
        "layout_fingerprint": "l",
        "transport": "loopback",
        "block_size": 64,
    }
    return Member(**{**options, **change})  # type: ignore[arg-type]


def prefill(number: int, **change: object) -> Member:
    return endpoint(Role.PREFILL, number, **change)


def decode(number: int, **change: object) -> Member:
    return endpoint(Role.DECODE, number, **change)


def pool_of(*members: Member) -> PoolView:
    pool = PoolView(Clock())
    pool.update(members)
    return pool


def load(num_requests: int = 0, **change: int) -> WorkerLoad:
    return WorkerLoad(num_requests_running=num_requests, **change)
