"""What ``tandem status`` says of several models behind the routers, from what these say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.plan import Role

_COUNTS = ("num_requests_in_flight", "num_requests_waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One of several models."""

    name: str
    aliases: Sequence[str]
    missing: Sequence[str]
    """What keeps it from being served; empty: nothing."""
    num_running: int
    num_waiting: int
    num_prefill: int
    """Endpoints of the role that routers know, whoever started them."""
    num_decode: int


def models_of(router: Mapping[str, Any]) -> list[ModelView]:
    """Of what ``/status`` said; empty where there is but one model."""
    told = router.get("models") or ()
    if len(told) < 2:
        return []
    return [_view(model, router.get("workers", ())) for model in told]


def sum_of_models(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """What several routers say of models, added up; what one of them lacks is missing."""
    totals: dict[str, Mapping[str, Any]] = {}
    for model in (model for answer in answers for model in answer):
        former = totals.get(model["name"])
        if former is None:
            totals[model["name"]] = model
            continue
        sums = {name: former[name] + model[name] for name in _COUNTS}
        missing = former["missing"] or model["missing"]
        totals[model["name"]] = {**model, **sums, "missing": missing}
    return list(totals.values())


def _view(model: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> ModelView:
    roles = [worker["role"] for worker in workers if worker["model"] == model["name"]]
    return ModelView(
        name=model["name"],
        aliases=list(model["aliases"]),
        missing=list(model["missing"]),
        num_running=model["num_requests_in_flight"],
        num_waiting=model["num_requests_waiting"],
        num_prefill=roles.count(Role.PREFILL.value),
        num_decode=roles.count(Role.DECODE.value),
    )
