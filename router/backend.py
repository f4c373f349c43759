"""One model behind a router: its workers, who serves next, and what waits for them.

Nothing is shared between two of them but the memory for bodies: a pair is made of workers of one
pool, so it is never of two models, and a model without workers is nobody else's trouble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from router.errors import RequestError
from router.metrics.model import ModelMetrics
from router.model import ModelLimits, ServedModel
from router.pool.members import Member, Role, WorkerKey
from router.pool.readiness import Readiness
from router.pool.view import PoolView
from router.requests.admission import (
    REQUESTS_OF_SILENT_RANK,
    URGENT_SHARE,
    Admission,
    BodyBudget,
    BodyBytes,
    limit_of,
)
from router.requests.attempt import Workers
from router.requests.cache_streams import CacheStreams
from router.requests.clients import WorkerClients
from router.requests.frames import FrameStreams
from router.requests.pipeline import Pipeline
from router.routing.policy import PairingPolicy
from router.routing.prefixes import Prefixes
from router.text.grammar.compilers import Compilers
from runtime.config import RouterSection
from runtime.net.credentials import Credentials
from runtime.tiers import Tiers

MayUse = Callable[[Sequence[str]], bool]
"""Whether a model of these names is for whoever asks."""


class Backend:
    """One model and its workers. Create it on the event loop, which owns it."""

    def __init__(
        self,
        model: ServedModel,
        section: RouterSection,
        metrics: ModelMetrics,
        *,
        credentials: Credentials,
        router_id: str,
        clock: Callable[[], float],
        bodies: BodyBudget,
        tiers: Tiers,
    ) -> None:
        """``bodies`` are those of all models."""
        self.model = model
        self.metrics = metrics
        self.pool = PoolView(clock)
        clients = WorkerClients(credentials)
        frames = FrameStreams(
            self.pool, clients, router_id, resume_timeout_s=section.resume_timeout_s
        )
        policy = PairingPolicy(section.policy, prefixes=Prefixes(clock))
        prefixes = policy.prefixes  # what workers' caches hold is followed where it matters
        caches = CacheStreams(self.pool, clients, router_id, prefixes.index) if prefixes else None
        self._workers = Workers(self.pool, clients, frames, router_id, metrics, caches=caches)
        self.pool.on_change(self._workers.follow_pool)
        self._section = section
        self.admission = Admission(
            section.max_concurrent_requests or REQUESTS_OF_SILENT_RANK,
            queue_timeout_s=section.queue_timeout_s,
            bodies=bodies,
            last_order=tiers.standing(tiers.last).order,
            on_refused=metrics.tiers.count_refused,
        )
        self.readiness = Readiness(self.pool, found_by=clock() + section.worker_wait_s)
        self.compilers = Compilers(model.folder, model.limits.vocab_size)
        if model.warm_grammars:
            self.compilers.warm()
        self.pipeline = Pipeline(self._workers, policy, section, self.readiness)
        self._limits = -1, model.limits
        """Of a version of the pool."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name

    def limits(self) -> ModelLimits:
        """Of the model and of the workers that are there; any thread may ask."""
        version, limits = self._limits
        if version != self.pool.version:
            version = self.pool.version
            limits = self.model.limits_with(self.pool.members())
            self._limits = version, limits
        return limits

    def update(self, members: Sequence[Member]) -> None:
        """``members`` serve the model now."""
        self.pool.update(members)
        if self._section.max_concurrent_requests:
            return
        ranks = [rank for rank in self.pool.members(Role.DECODE) if not rank.draining]
        if ranks:  # else the last limit stands: who waits is let in when ranks are back
            number = self._section.http_processes
            urgent_limit = limit_of(ranks, number, URGENT_SHARE)
            self.admission.set_limit(limit_of(ranks, number), urgent_limit)

    def tick(self) -> None:
        """Drop what workers that left no longer need."""
        self.metrics.requests_waiting.set(self.admission.num_waiting)
        self._workers.follow_pool()

    async def close(self) -> None:
        """End all streams and channels."""
        await self.compilers.close()
        await self._workers.close()


class Backends:
    """All models of one router process; the first serves requests that name none."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        """``backends`` have different names and aliases; there is at least one."""
        self._backends = tuple(backends)
        self._by_name: Mapping[str, Backend] = {
            name: backend for backend in backends for name in backend.model.names
        }

    def __iter__(self) -> Iterator[Backend]:
        return iter(self._backends)

    @property
    def default(self) -> Backend:
        """Of requests that name no model."""
        return self._backends[0]

    @property
    def version(self) -> int:
        """Grows with every change of a pool, load excepted."""
        return sum(backend.pool.version for backend in self._backends)

    @property
    def num_in_flight(self) -> int:
        """Choices of requests that have a place."""
        return sum(backend.admission.num_in_flight for backend in self._backends)

    @property
    def num_waiting(self) -> int:
        """Requests in queues."""
        return sum(backend.admission.num_waiting for backend in self._backends)

    def num_waiting_by_tier(self) -> Counter[str]:
        """The same by the names of tiers."""
        counts: Counter[str] = Counter()
        for backend in self._backends:
            counts += backend.admission.num_waiting_by_tier()
        return counts

    def num_in_flight_by_tier(self) -> Counter[str]:
        """Choices of requests that have a place, by the names of tiers."""
        counts: Counter[str] = Counter()
        for backend in self._backends:
            counts += backend.admission.num_in_flight_by_tier()
        return counts

    def body(self) -> BodyBytes:
        """Count the bytes of one body, whichever model it will ask for."""
        return self.default.admission.body()  # all have one budget

    @property
    def limit(self) -> int:
        """Choices that may be in flight."""
        return sum(backend.admission.limit for backend in self._backends)

    @property
    def draining(self) -> bool:
        """Whether the process is about to end."""
        return self.default.admission.draining

    def find(self, name: str | None) -> Backend | None:
        """The model of that name or alias; None where there is none."""
        return self.default if name is None else self._by_name.get(name)

    def choose(self, name: str | None, may_use: MayUse = lambda names: True) -> Backend:
        """The model that a request for ``name`` is served by; any thread may ask.

        Raises:
            RequestError: there is none of that name (404); of those that are there, the ones that
                whoever asks may use are named.
        """
        backend = self.find(name)
        if backend is None:
            raise self._unknown(name or "", may_use)
        return backend

    def update(self, members: Sequence[Member]) -> None:
        """The pool changed: each model has its own."""
        for backend in self._backends:
            backend.update([member for member in members if member.model == backend.name])

    def members(self) -> list[Member]:
        """Of all pools."""
        return [member for backend in self._backends for member in backend.pool.members()]

    def pools(self) -> dict[WorkerKey, PoolView]:
        """In which each member is."""
        return {
            member.key: backend.pool
            for backend in self._backends
            for member in backend.pool.members()
        }

    def missing(self) -> list[str]:
        """What keeps every model from being served; empty when one of them can be."""
        missing = {backend.name: backend.readiness.missing() for backend in self._backends}
        if not all(missing.values()):
            return []
        if len(missing) == 1:
            return missing[self.default.name]
        return [f"{name}: {problem}" for name, of_model in missing.items() for problem in of_model]

    def drain(self) -> None:
        """Admit nothing new and refuse who waits."""
        for backend in self._backends:
            backend.admission.drain()

    async def close(self) -> None:
        """End all streams and channels."""
        for backend in self._backends:
            await backend.close()

    def _unknown(self, name: str, may_use: MayUse) -> RequestError:
        known = [
            each
            for backend in self._backends
            if may_use(backend.model.names)
            for each in backend.model.names
        ]
        base, colon, _ = name.partition(":")
        if colon and base in known:
            problem, fix = "adapters (LoRA) are not served", f"send model = {base!r}"
        else:
            problem = "does not exist here"
            fix = f"send model = {' or '.join(map(repr, known))}" if known else "ask for a key"
        return RequestError(
            f"model = {name!r} {problem}. Fix: {fix}",
            param="model",
            code="model_not_found",
            status=404,
        )
