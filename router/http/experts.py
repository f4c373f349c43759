"""``GET /experts``: what the experts of running workers get, told at once or as a trace.

A recording is the request: it ends with its passes, its time, or the client's leaving, and nothing
stays switched on in the workers. One at a time in a process, because its windows are kept here.
"""

from __future__ import annotations

import asyncio
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from router.errors import RecordingError, RequestError
from router.http.serving import Serving
from router.pool.members import Member, Role
from runtime.errors import ConfigError
from runtime.net.roles import Role as Callee

if TYPE_CHECKING:
    from experts.trace import ExpertTrace
    from router.pool.expert_recording import ExpertRecording, Rank

MAX_PASSES: Final = 2048
MAX_ROWS: Final = 256
"""Of a recording: beyond, passes are added up, as in ``tandem experts record``. A row of
DeepSeek-V3 takes 119 kB."""
MAX_SECONDS: Final = 600.0
NUM_PASSES: Final = 64
SECONDS: Final = 10.0
_NUM_HOTTEST: Final = 8
_FORMATS: Final = ("json", "npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request is for."""

    role: Role
    worker: str
    model: str
    passes: int
    seconds: float
    format: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Asked:
        """Read the query.

        Raises:
            RequestError: a value that cannot be.
        """
        roles = [role.value for role in Role]
        return cls(
            role=Role(_one_of(query, "role", roles, Role.DECODE.value)),
            worker=query.get("worker", ""),
            model=query.get("model", ""),
            passes=int(_number(query, "passes", NUM_PASSES, 1, MAX_PASSES)),
            seconds=_number(query, "seconds", SECONDS, 0.1, MAX_SECONDS),
            format=_one_of(query, "format", _FORMATS, "json"),
        )

    def ranks_of(self, members: Sequence[Member]) -> Mapping[str, Sequence[Rank]]:
        """The ranks to ask, by instance.

        Raises:
            RecordingError: none is in the pool.
        """
        from router.pool.expert_recording import Rank

        found: dict[str, list[Rank]] = defaultdict(list)
        for member in sorted(members, key=lambda member: member.key):
            name, number = member.key.instance, member.key.rank
            is_meant = self.worker in ("", name) and self.model in ("", member.model)
            if member.role is self.role and is_meant:
                role = Callee(member.role.value)
                rank = Rank(instance=name, number=number, address=member.address, role=role)
                found[name].append(rank)
        if not found:
            named = "".join(f" {name!r}" for name in (self.worker, self.model) if name)
            raise RecordingError(
                f"no {self.role.value} worker{named} is in the pool. Fix: one that GET /status has"
            )
        return found


class ExpertRecordings:
    """Of one HTTP process."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._is_recording = False

    async def answer(self, request: web.Request) -> web.Response:
        """Record, and answer with what there is."""
        asked = Asked.of(request.query)
        ranks = asked.ranks_of(self._serving.backends.members())
        if self._is_recording:
            raise RecordingError("another recording runs. Fix: ask again when it is over")
        self._is_recording = True
        try:
            recording = await self._record(asked, ranks)
        finally:
            self._is_recording = False
        if asked.format == "json":
            body = await asyncio.to_thread(_describe, recording)
            return web.Response(body=body, content_type="application/json")
        return web.Response(
            body=await asyncio.to_thread(_bytes_of, recording.trace),
            content_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{asked.role.value}.npz"'},
        )

    async def _record(self, asked: Asked, ranks: Mapping[str, Sequence[Rank]]) -> ExpertRecording:
        # Imported late: few routers are ever asked, and this takes numpy.
        from router.pool.expert_recording import Wanted, record

        size = -(-asked.passes // MAX_ROWS)
        wanted = Wanted(
            passes_per_window=size, num_windows=asked.passes // size, seconds=asked.seconds
        )
        return await record(ranks, self._serving.credentials, wanted)


def _describe(recording: ExpertRecording) -> bytes:
    from experts.summary import check_not_empty, describe_trace, rank_load, summarise

    trace = recording.trace
    try:
        check_not_empty(trace)
    except ConfigError as error:
        raise RecordingError(f"no step had a token: {error.problem}. Fix: {error.fix}") from error
    told = describe_trace(trace)
    if trace.num_experts % trace.num_ranks == 0:  # else there is no such order to hold them in
        told |= summarise(trace, num_ranks=trace.num_ranks, num_hottest=_NUM_HOTTEST).describe()
    told["rank_load"] = [
        {"instance": load.instance, "layers": load.layers}
        | rank_load(load.trace, load.placement_LP).describe()
        for load in recording.loads
    ]
    return orjson.dumps(told)


def _bytes_of(trace: ExpertTrace) -> bytes:
    file = io.BytesIO()
    trace.write(file)
    return file.getvalue()


def _one_of(query: Mapping[str, str], name: str, known: Sequence[str], default: str) -> str:
    value = query.get(name, default)
    if value not in known:
        raise RequestError(f"{name} = {value!r}. Fix: one of {', '.join(known)}", param=name)
    return value


def _number(
    query: Mapping[str, str], name: str, default: float, least: float, most: float
) -> float:
    text = query.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise RequestError(f"{name} = {text!r}. Fix: {least:g} to {most:g}", param=name)
    return value
