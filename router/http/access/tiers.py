"""The standing of a request: its tier by ``service_tier`` and its key, and its ``priority``."""

from __future__ import annotations

from dataclasses import replace

from router.errors import ForbiddenError, RequestError
from router.http.openai.schema import GenerationRequest
from router.keys.record import KeyRecord
from router.keys.tiers import allowed_tiers, usual_tier
from runtime.config.tiers import RESERVED_NAMES
from runtime.tiers import Standing, Tiers


def standing_of(
    request: GenerationRequest, tiers: Tiers, key: KeyRecord | None, *, max_priority: int
) -> Standing:
    """Where ``request``, of ``key``, stands among others.

    Without tiers its ``service_tier`` says nothing, and so does its ``priority`` where
    ``max_priority`` (router.max_priority) is 0.

    Raises:
        RequestError: there is no such tier, or the priority is out of range.
        ForbiddenError: the key, or who has none, may not have the tier.
    """
    tier = _tier_of(request.service_tier, tiers, key) if tiers else ""
    standing = tiers.standing(tier, _priority_of(request.priority, max_priority))
    return standing if key is None else replace(standing, tenant=key.tenant)


def _tier_of(asked: str | None, tiers: Tiers, key: KeyRecord | None) -> str:
    allowed = allowed_tiers(tiers, key)
    if asked is None or asked in RESERVED_NAMES:
        asked = usual_tier(tiers, key) or tiers.default
    elif asked not in tiers.names:
        names = ", ".join((*RESERVED_NAMES, *tiers.names))
        raise RequestError(
            f"service_tier = {asked[:40]!r} is no tier of this server. Fix: send one of {names}",
            param="service_tier",
            code="unsupported_value",
        )
    if asked in allowed:
        return asked
    who = "a request without a key" if key is None else f"the key {key.name!r}"
    fix = f"send one of {', '.join(allowed)}, or " if allowed else ""
    raise ForbiddenError(
        f"service_tier = {asked!r}: {who} may not have it. Fix: {fix}a key that may "
        f"(`tandem keys add NAME --tier {asked}`)",
        param="service_tier",
        code="service_tier_not_allowed",
    )


def _priority_of(asked: int | None, most: int) -> int:
    if asked is None or not most:
        return 0
    if not -most <= asked <= most:
        raise RequestError(
            f"priority = {asked} is out of range (router.max_priority). Fix: send an integer from "
            f"{-most} to {most}; the lowest goes first",
            param="priority",
        )
    return asked
