"""What handlers work with, and which model a request is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from router.backend import Backend, Backends
from router.http.access.gate import Gate, may_use
from router.http.console.finished import FinishedRequests
from router.metrics.core import RouterMetrics
from router.metrics.recent import Recent
from router.text.lanes import Lanes
from runtime.config import RouterSection
from runtime.net.credentials import Credentials
from runtime.stragglers.rank_picture import RankPicture
from runtime.tiers import Tiers
from runtime.trace.spans import Spans

MODEL_KEY: web.RequestKey[str] = web.RequestKey("model", str)
"""The name of the model, once it is known."""


@dataclass(slots=True, kw_only=True)
class Serving:
    """What handlers work with; one per router process."""

    section: RouterSection
    backends: Backends
    lanes: Lanes
    metrics: RouterMetrics
    recent: Callable[[], Recent]
    gate: Gate
    credentials: Credentials
    """Of the cluster, for calls to workers."""
    tiers: Tiers = field(default_factory=Tiers)
    spans: Spans | None = None
    """None: requests are not traced."""
    sample_ratio: float = 0.0
    finished: FinishedRequests = field(default_factory=FinishedRequests)
    ranks: Sequence[RankPicture] = ()
    """Of instances of several ranks, as last heard; this and the next change."""
    refused: Sequence[str] = ()
    """Workers that are not in a pool because the registry refuses them, each with why."""


def backend_for(serving: Serving, request: web.Request, name: str | None) -> Backend:
    """The model that ``request``, which asks for ``name``, is served by; any thread may ask.

    Raises:
        RequestError: there is none of that name (404).
        ForbiddenError: the request's key may not use it.
    """
    backend = serving.backends.choose(name, partial(may_use, request))
    serving.gate.check_model(request, backend.model.names)
    request[MODEL_KEY] = backend.name
    return backend
