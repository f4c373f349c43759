"""The gRPC side of operations, in the controller: what it refuses has changed nothing.

Importing it loads gRPC, so it is imported when Ray's daemons run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from deploy.control.apply import ApplyWish, prepare_apply
from deploy.control.events import Event, EventLog
from deploy.control.operation import OperationDesk, Outcome, Step
from deploy.control.plans import OperationPlan, Prepared
from deploy.control.restart import RestartWish, chosen, prepare_restart
from deploy.control.scale import ScaleWish, prepare_scale
from deploy.control.set_aside import prepare_drain
from deploy.errors import ClusterError, WrongArgumentError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from runtime.errors import ConfigError
from runtime.net.credentials import Listen
from runtime.pb import controller_pb2 as pb
from runtime.pb import controller_pb2_grpc
from runtime.rpc.grpc_calls import CONTROL_LIMITS, bind_port, create_server

Context = grpc.aio.ServicerContext[Any, Any]
Prepare = Callable[[], Awaitable[Prepared]]
Asked = pb.ScaleRequest | pb.DrainInstanceRequest | pb.RestartRequest | pb.ApplyRequest

_MOST_LOG_BYTES = 256 * 1024


class ControllerService(controller_pb2_grpc.ControllerServicer):
    """Takes orders; one is prepared at a time."""

    def __init__(self, fleet: Fleet, events: EventLog, desk: OperationDesk) -> None:
        self._fleet = fleet
        self._events = events
        self._desk = desk
        self._preparing = asyncio.Lock()

    async def Scale(
        self, request: pb.ScaleRequest, context: Context
    ) -> AsyncIterator[pb.OperationUpdate]:
        """See controller.proto."""

        async def prepare() -> Prepared:
            role = _worker_role(request.role)
            self._desk.check_free(frozenset({role}))
            return await prepare_scale(
                self._fleet,
                ScaleWish(
                    role=role,
                    count=request.count,
                    relative=request.relative,
                    deadline_s=request.deadline_s,
                    who=request.who,
                ),
            )

        async for update in self._carry_out(f"scale {request.role}", request, prepare, context):
            yield update

    async def Drain(
        self, request: pb.DrainInstanceRequest, context: Context
    ) -> AsyncIterator[pb.OperationUpdate]:
        """See controller.proto."""

        async def prepare() -> Prepared:
            return prepare_drain(self._fleet, request.instance, request.deadline_s, request.who)

        async for update in self._carry_out(f"drain {request.instance}", request, prepare, context):
            yield update

    async def Restart(
        self, request: pb.RestartRequest, context: Context
    ) -> AsyncIterator[pb.OperationUpdate]:
        """See controller.proto."""

        async def prepare() -> Prepared:
            instances = chosen(self._fleet, request.target)
            self._desk.check_free(frozenset(one.plan.role for one in instances))
            return await prepare_restart(
                self._fleet,
                RestartWish(
                    target=request.target,
                    rolling=request.rolling,
                    allow_gap=request.allow_gap,
                    deadline_s=request.deadline_s,
                    who=request.who,
                ),
            )

        async for update in self._carry_out(f"restart {request.target}", request, prepare, context):
            yield update

    async def Apply(
        self, request: pb.ApplyRequest, context: Context
    ) -> AsyncIterator[pb.OperationUpdate]:
        """See controller.proto."""

        async def prepare() -> Prepared:
            self._desk.check_free(frozenset(Role))
            return await prepare_apply(
                self._fleet,
                ApplyWish(
                    config=request.config,
                    allow_gap=request.allow_gap,
                    deadline_s=request.deadline_s,
                    who=request.who,
                ),
            )

        async for update in self._carry_out("apply", request, prepare, context):
            yield update

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        """See controller.proto."""
        if not request.follow:
            for event in self._events.newest(request.most):
                yield _event(event)
            return
        async for event in self._events.follow(request.most):
            yield _event(event)

    async def ReadLog(self, request: pb.ReadLogRequest, context: Context) -> pb.ReadLogResponse:
        """See controller.proto."""
        try:
            piece = await self._fleet.read_log(
                request.process, request.offset, request.max_bytes or _MOST_LOG_BYTES
            )
        except WrongArgumentError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ClusterError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return pb.ReadLogResponse(data=piece.data, offset=piece.offset)

    async def _carry_out(
        self, what: str, asked: Asked, prepare: Prepare, context: Context
    ) -> AsyncIterator[pb.OperationUpdate]:
        operation = None
        dry_run = not isinstance(asked, pb.DrainInstanceRequest) and asked.dry_run
        try:
            # What is planned must still be true when it begins.
            async with self._preparing:
                prepared = await prepare()
                if not dry_run:
                    request = dataclasses.replace(prepared.request, source=context.peer())
                    operation = self._desk.begin(request, prepared.work)
        except (ConfigError, ClusterError) as error:
            is_wrong = isinstance(error, WrongArgumentError | ConfigError)
            text = str(error)
            if not dry_run:
                failure = self._desk.note_refusal(what, asked.who, context.peer(), text)
                text += f"\nThis is not on record: {failure}" if failure else ""
            status = grpc.StatusCode
            code = status.INVALID_ARGUMENT if is_wrong else status.FAILED_PRECONDITION
            await context.abort(code, text)
        yield pb.OperationUpdate(time=time.time(), plan=_plan(prepared.plan))
        if operation is not None:
            async for update in operation.follow():
                yield _update(update)


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerServer:
    """The service as it listens."""

    address: str
    server: grpc.aio.Server
    desk: OperationDesk

    async def close(self, *, goes_on: bool) -> None:
        """End what runs, which its followers are told, and then the service.

        Args:
            goes_on: see `OperationDesk.close`.
        """
        await self.desk.close(goes_on=goes_on)
        await self.server.stop(0.5)


async def serve_controller(fleet: Fleet, events: EventLog) -> ControllerServer:
    """Take orders from now on, on any free port of the cluster's interface.

    Raises:
        ConfigError: it cannot listen there.
    """
    context = fleet.context
    cluster = context.config.cluster
    desk = OperationDesk(events)
    server = create_server(context.credentials, CONTROL_LIMITS)
    controller_pb2_grpc.add_ControllerServicer_to_server(
        ControllerService(fleet, events, desk), server
    )
    listen = Listen(bind=cluster.host, advertise=cluster.advertise)
    port = bind_port(server, listen, context.credentials, "cluster.host")
    await server.start()
    return ControllerServer(address=listen.address(port), server=server, desk=desk)


def _worker_role(name: str) -> Role:
    if name not in (Role.PREFILL.value, Role.DECODE.value):
        raise WrongArgumentError(f"{name!r} cannot be scaled. Fix: prefill or decode")
    return Role(name)


def _update(update: Step | Outcome) -> pb.OperationUpdate:
    if isinstance(update, Outcome):
        outcome = pb.Outcome(ok=update.ok, message=update.message, seconds=update.seconds)
        return pb.OperationUpdate(time=update.time, outcome=outcome)
    step = pb.OperationStep(
        instance=update.instance,
        text=update.text,
        num_requests_left=-1 if update.num_requests_left is None else update.num_requests_left,
        num_tokens_left=-1 if update.num_tokens_left is None else update.num_tokens_left,
    )
    return pb.OperationUpdate(time=update.time, step=step)


def _plan(plan: OperationPlan) -> pb.OperationPlan:
    return pb.OperationPlan(
        what=plan.what,
        start=plan.start,
        restart=plan.restart,
        stop=plan.stop,
        changes=[
            pb.FieldChange(field=one.field, old=repr(one.old), new=repr(one.new), effect=one.effect)
            for one in plan.changes
        ],
        notes=plan.notes,
        sizes=[
            pb.RoleSize(
                role=one.role.value,
                instances_now=one.instances_now,
                instances=one.instances,
                ranks=one.ranks,
            )
            for one in plan.sizes
        ],
        num_devices=plan.num_devices,
        num_devices_now=plan.num_devices_now,
    )


def _event(event: Event) -> pb.Event:
    return pb.Event(
        time=event.time,
        kind=event.kind.value,
        who=event.who,
        source=event.source,
        instance=event.instance,
        text=event.text,
    )
