"""Those who pay for CPU time in tests."""

from __future__ import annotations

from runtime.tiers import Standing


class Tenant:
    """Who pays, and how often that was."""

    def __init__(self, name: str) -> None:
        self.standing = Standing(tenant=name)
        self.paid_s: list[float] = []

    def pay(self, cpu_s: float) -> None:
        self.paid_s.append(cpu_s)
