"""Records what experts get: every rank of an instance at once, window by window, added up.

Each rank counts the tokens of its own requests. Ranks of an instance make the same steps, and say
by number of which steps a window is, so windows of the same steps are added up; one that not every
rank has told of is left out. Instances make steps of their own: their windows are rows of the
recording one behind the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from experts.trace import ExpertTrace
from router.errors import RecordingError
from runtime.net.credentials import Credentials
from runtime.net.roles import Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from runtime.pb.experts_pb2 import ExpertModel, RecordFrame

OPEN_TIMEOUT_S = 10.0
"""For a rank to answer what it records; it does so at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank that counts tokens of its own."""

    instance: str
    number: int
    address: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How much to record.

    Attributes:
        passes_per_window: steps that are added up in a row.
        num_windows: rows of each instance; 0: as many as end in the time.
        seconds: to record at most.
    """

    passes_per_window: int = 1
    num_windows: int = 0
    seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """How much there is by now, of all instances."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InstanceLoad:
    """What the experts of one instance got, and where they stood.

    Attributes:
        instance: its name.
        layers: numbers in the model of its L layers with experts.
        trace: of its rows alone.
        placement_LP: [L, slots] int64, the expert of each slot, as it was told last.
    """

    instance: str
    layers: tuple[int, ...]
    trace: ExpertTrace
    placement_LP: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertRecording:
    """What was recorded at once.

    Attributes:
        trace: rows of all instances, one behind the other; it does not say where experts stood.
        loads: each instance that has rows, with what says so.
    """

    trace: ExpertTrace
    loads: tuple[InstanceLoad, ...]


async def record(
    instances: Mapping[str, Sequence[Rank]],
    credentials: Credentials,
    wanted: Wanted,
    *,
    until: asyncio.Event | None = None,
    on_progress: Callable[[Recorded], None] = lambda recorded: None,
) -> ExpertRecording:
    """Record all of ``instances`` at once.

    Args:
        instances: their ranks.
        credentials: of the cluster.
        wanted: how much.
        until: ends it earlier, with what there is by then.
        on_progress: hears of every row.

    Raises:
        RecordingError: a rank does not answer, lacks experts or is not in the pool, or no window
            ended in the time.
    """
    recordings = [_Recording(ranks, credentials, wanted) for ranks in instances.values()]
    ended = until or asyncio.Event()

    def told() -> None:
        num_rows = sum(len(recording.rows) for recording in recordings)
        num_tokens = sum(recording.num_tokens for recording in recordings)
        on_progress(Recorded(num_rows=num_rows, num_tokens=num_tokens))

    tasks = [asyncio.ensure_future(recording.run(ended, told)) for recording in recordings]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    loads = tuple(
        recording.load(wanted.passes_per_window) for recording in recordings if recording.rows
    )
    if not loads:
        every = wanted.passes_per_window
        steps = "no step was" if every == 1 else f"fewer than {every} steps were"
        raise RecordingError(
            f"{steps} made in {wanted.seconds:g} s. Fix: send requests meanwhile, or record for "
            "longer"
        )
    trace = dataclasses.replace(
        loads[0].trace,
        counts_NLE=np.concatenate([load.trace.counts_NLE for load in loads]),
        tokens_N=np.concatenate([load.trace.tokens_N for load in loads]),
    )
    return ExpertRecording(trace=trace, loads=loads)


def _trace_of(
    model: ExpertModel, counts_NLE: NDArray[np.int64], passes_per_row: int
) -> ExpertTrace:
    """What an instance got, summed over ranks."""
    from runtime.pb import common_pb2

    return ExpertTrace(
        counts_NLE=counts_NLE,
        tokens_N=np.array([_tokens_of(model, counts) for counts in counts_NLE], dtype=np.int64),
        role="prefill" if model.role == common_pb2.ROLE_PREFILL else "decode",
        model_name=model.name,
        top_k=model.top_k,
        num_groups=model.num_groups,
        topk_group=model.topk_group,
        num_ranks=model.num_ranks,
        passes_per_row=passes_per_row,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        expert_bytes=model.expert_bytes,
        num_draft_layers=model.num_draft_layers,
    )


def _tokens_of(model: ExpertModel, counts_LE: NDArray[np.int64]) -> int:
    """Tokens of a row: every one is ``top_k`` choices in each layer that does not draft."""
    own_L = counts_LE[: len(counts_LE) - model.num_draft_layers].sum(axis=1)
    return int(-(-own_L.max(initial=0) // model.top_k))


@dataclass(slots=True)
class _Recording:
    """One instance."""

    ranks: Sequence[Rank]
    credentials: Credentials
    wanted: Wanted
    models: dict[int, ExpertModel] = field(default_factory=dict)
    placement: bytes = b""
    """As a rank has told it last; all have the same from the same step on."""
    rows: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Whole ones, by the number of the first pass."""
    num_tokens: int = 0
    _parts: dict[int, dict[int, NDArray[np.int64]]] = field(default_factory=dict)
    _is_enough: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> ExpertModel:
        """Of the instance."""
        return next(iter(self.models.values()))

    def load(self, passes_per_row: int) -> InstanceLoad:
        """What there is; there are rows."""
        model = self.model
        counts_NLE = np.stack([self.rows[first] for first in sorted(self.rows)])
        placement = np.frombuffer(self.placement, dtype="<i4").astype(np.int64)
        return InstanceLoad(
            instance=self.ranks[0].instance,
            layers=tuple(model.layers),
            trace=_trace_of(model, counts_NLE, passes_per_row),
            placement_LP=placement.reshape(len(model.layers), model.num_slots),
        )

    async def run(self, until: asyncio.Event, told: Callable[[], None]) -> None:
        """Until there is enough, or the time is over."""
        tasks: list[asyncio.Future[object]] = [
            asyncio.ensure_future(self._follow(rank, told)) for rank in self.ranks
        ]
        tasks += [asyncio.ensure_future(event.wait()) for event in (self._is_enough, until)]
        try:
            done, _ = await asyncio.wait(
                tasks, timeout=self.wanted.seconds, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, rank: Rank, told: Callable[[], None]) -> None:
        async with contextlib.aclosing(self._frames(rank)) as frames:
            async for frame in frames:
                if frame.HasField("model"):
                    self._open(rank, frame.model)
                else:
                    self._take(rank, frame)
                    told()

    async def _frames(self, rank: Rank) -> AsyncGenerator[RecordFrame, None]:
        # Imported late: the command line must answer without gRPC.
        from runtime.errors import TandemError
        from runtime.pb import experts_pb2, experts_pb2_grpc
        from runtime.rpc.grpc_calls import map_rpc_errors, open_channel

        channel = open_channel(rank.address, self.credentials, rank.role)
        name = f"{rank.instance}/{rank.number}"
        try:
            with map_rpc_errors(f"{name} at {rank.address}"):
                stub = experts_pb2_grpc.ExpertsStub(channel)
                request = experts_pb2.RecordRequest(passes_per_window=self.wanted.passes_per_window)
                frames = aiter(stub.Record(request))
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    first = await anext(frames)
                yield first
                async for frame in frames:
                    yield frame
        except TimeoutError as error:
            raise RecordingError(f"{name} does not answer") from error
        except TandemError as error:
            raise RecordingError(f"{name} cannot be recorded: {error.message}") from error
        finally:
            await channel.close(None)

    def _open(self, rank: Rank, model: ExpertModel) -> None:
        if model.num_endpoints != len(self.ranks):
            raise RecordingError(
                f"{rank.instance} has {model.num_endpoints} ranks that take requests, and "
                f"{len(self.ranks)} are in the router's pool. Fix: wait until `tandem status` "
                "says that all are ready"
            )
        self.models[rank.number] = model
        self.placement = model.placement

    def _take(self, rank: Rank, frame: RecordFrame) -> None:
        """Put a rank's part of a window to those of the others; more may come than is wanted."""
        if self._is_enough.is_set():
            return
        model, window = self.models[rank.number], frame.window
        self.placement = window.placement or self.placement
        counts = np.frombuffer(window.counts, dtype="<i8").astype(np.int64)
        parts = self._parts.setdefault(window.first_pass, {})
        parts[rank.number] = counts.reshape(len(model.layers), model.num_experts)
        if len(parts) == len(self.ranks):
            row = self.rows[window.first_pass] = np.sum(list(parts.values()), axis=0)
            self.num_tokens += _tokens_of(model, row)
            # Those before it that are not whole began before all ranks were asked.
            for first in [first for first in self._parts if first <= window.first_pass]:
                del self._parts[first]
        if self.wanted.num_windows and len(self.rows) >= self.wanted.num_windows:
            self._is_enough.set()


def passes_of_a_window(num_passes: int, *, is_per_pass: bool, most: int = 32) -> int:
    """How many passes to add up in a row, so that whole rows make ``num_passes``."""
    if is_per_pass:
        return 1
    return max(size for size in range(1, most + 1) if num_passes % size == 0)
