"""gRPC as we use it: authenticated servers and channels, and their errors as ours.

Every call carries the cluster's secret; a server answers UNAUTHENTICATED to anything else, without
reading its message, and PERMISSION_DENIED to a caller whose role may not make that call
(`runtime.net.roles`). With TLS both ends show certificates as well (`runtime.net.credentials`). A
call that is made for a request carries its trace (`runtime.trace.context`), and the handler goes on
with it. Keepalive pings find a dead peer within seconds even where no packet says so. The stubs of
grpc are generic in their messages, which the interceptors do not look at: hence their Any.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from runtime.errors import (
    ConfigError,
    DeadlineExceededError,
    InternalError,
    OverloadedError,
    PeerLostError,
    RequestCancelledError,
    TandemError,
)
from runtime.logging import fields, get_logger
from runtime.net.credentials import Credentials, Listen, TlsFiles, join_address
from runtime.net.roles import ALL_ROLES, Role, Roles, refusal, roles_of_names
from runtime.rpc.renewal import Renewed
from runtime.trace.context import TRACEPARENT, TRACESTATE, TraceContext, current_trace, set_trace

logger = get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 2**20
_AUTHORIZATION = "authorization"
_BEARER = b"Bearer "
_CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # A restarted peer must be reachable at once, not after a minute of back-off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Against its name, this is how long one attempt to connect may take: TCP, TLS, HTTP/2. A port
    # that refuses is tried again after the back-off, whatever stands here.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Channels of one process to one address must not share a connection: closing one of them would
    # otherwise leave the other on a connection to the address's former owner.
    ("grpc.use_local_subchannel_pool", 1),
]
_SERVER_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    # A connection that says nothing, or a peer that does not answer any more, is cut.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    # Measuring the way to each caller widens the window by megabytes a connection, also for those
    # who have shown no secret. A message that is wanted is let in whole all the same.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers must never share a port silently.
    ("grpc.so_reuseport", 0),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What callers may ask of a server, with the secret or without."""

    max_request_bytes: int
    max_concurrent_rpcs: int
    """One more is answered RESOURCE_EXHAUSTED. Must have room for calls that stay open for long."""


CONTROL_LIMITS = ServerLimits(max_request_bytes=2**20, max_concurrent_rpcs=4096)
"""Of the registry: records of a few hundred bytes; a stream for each HTTP process."""
WORKER_LIMITS = ServerLimits(max_request_bytes=4 * 2**20, max_concurrent_rpcs=16_384)
"""Of a worker. Reserve and Run carry the prompt, at 3 bytes a token: 4 MiB are 1.4 million tokens.
Run stays open from prefill's queue to the last byte, so its number is that of all requests that
routers admit; a Revoke must get through beside them, or decode takes a healthy writer for lost."""

_STATUS_ERRORS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
}
_BROKEN_CALL = (grpc.StatusCode.INTERNAL, "Internal error from Core")
"""What gRPC's asyncio client makes itself (``_AioCall.set_internal_error``) when a write or a read
of a call fails before it has heard the status that ended the call: the peer is going."""


_TELL_AGAIN_S = 60.0
_tell_again: dict[str, float] = {}
"""By what was refused: until then it is not told of again. As many as there are calls and roles."""
_caller: ContextVar[Roles] = ContextVar("caller", default=ALL_ROLES)


def caller_roles() -> Roles:
    """Of whoever made the call that is being served; outside of one: all."""
    return _caller.get()


class _CheckCaller(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The secret, and what its role and that of the certificate may call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._asks = credentials.asks_for_certificates

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        roles: Roles = frozenset()
        for key, value in handler_call_details.invocation_metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if key == _AUTHORIZATION and given.startswith(_BEARER):
                roles |= self._credentials.roles_of(given.removeprefix(_BEARER))
        if not roles:
            text = "the cluster's secret is missing or wrong"
            return _refusing(grpc.StatusCode.UNAUTHENTICATED, text)
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        path, _, method = handler_call_details.method.rpartition("/")
        service = path.strip("/").rpartition(".")[2]
        if reason := refusal(service, method, roles):
            return _refusing(grpc.StatusCode.PERMISSION_DENIED, reason)
        _caller.set(roles)
        return _checking(handler, service, method) if self._asks else handler


def _refusing(code: grpc.StatusCode, details: str) -> grpc.RpcMethodHandler[Any, Any]:
    """For any method: gRPC reads the message of a unary call before its handler runs, that of a
    stream only when the handler asks for it.
    """

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if code is grpc.StatusCode.PERMISSION_DENIED:
            _tell_refusal(context.peer(), details)
        await context.abort(code, details)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _tell_refusal(peer: str, reason: str) -> None:
    """It comes from somebody of the cluster: a mistake of who set it up, or an intruder."""
    now = time.monotonic()
    if now >= _tell_again.get(reason, now):
        _tell_again[reason] = now + _TELL_AGAIN_S
        logger.warning("refused a call %s", fields(peer=peer, reason=reason))


def _checking(
    handler: grpc.RpcMethodHandler[Any, Any], service: str, method: str
) -> grpc.RpcMethodHandler[Any, Any]:
    """``handler``, for callers whose certificate is of a role that may call it, too."""
    unary: Any = handler.unary_unary
    streamed: Any = handler.unary_stream

    async def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
        shown = context.auth_context()
        # Where a release of gRPC did not tell URIs apart: other names can only take roles away.
        uris = shown.get("peer_uri") or shown.get("x509_subject_alternative_name", ())
        roles = _caller.get() & roles_of_names(uri.decode(errors="replace") for uri in uris)
        _caller.set(roles)
        if reason := refusal(service, method, roles):
            reason += ", by its secret and its certificate"
            _tell_refusal(context.peer(), reason)
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)

    async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await check(context)
        return await unary(request, context)

    async def stream(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        await check(context)
        async for message in streamed(request, context):
            yield message

    messages = (handler.request_deserializer, handler.response_serializer)
    if unary is not None:
        return grpc.unary_unary_rpc_method_handler(answer, *messages)
    assert streamed is not None, "methods that take a stream are not in our protocols"
    return grpc.unary_stream_rpc_method_handler(stream, *messages)


class _TakeTrace(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The handler, which runs in the same task, goes on with the caller's trace."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = {
            key: value
            for key, value in handler_call_details.invocation_metadata
            if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)
        }
        if TRACEPARENT in given:
            trace = TraceContext.parse(given[TRACEPARENT], given.get(TRACESTATE, ""))
            set_trace(None if trace is None else trace.child())
        return await continuation(handler_call_details)


class _AuthorizedChannel(grpc.aio.Channel):
    """A channel whose calls carry the secret, and the trace of the request that makes the call.

    Client interceptors would do the same with a task for every call. Calls that take a stream and
    answer with one message are not in our protocols.
    """

    def __init__(self, channel: grpc.aio.Channel, secret: str) -> None:
        self._channel = channel
        self._authorization = (_AUTHORIZATION, f"Bearer {secret}")

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(args[0])

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._authorized(self._channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> grpc.aio.Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    def _authorized(self, multi_callable: Callable[..., Any]) -> Callable[..., Any]:
        authorization = self._authorization

        def call(*request: object, **kwargs: Any) -> Any:
            trace = current_trace()
            metadata: tuple[tuple[str, str], ...] = (authorization,)
            if trace is not None:
                metadata += ((TRACEPARENT, trace.header),)
                if trace.state:
                    metadata += ((TRACESTATE, trace.state),)
            return multi_callable(*request, metadata=metadata, **kwargs)

        return call


def create_server(
    credentials: Credentials, limits: ServerLimits = WORKER_LIMITS
) -> grpc.aio.Server:
    """A server that serves only callers with a secret of ``credentials``, within ``limits``, and
    each only with what its role may call.
    """
    most = limits.max_concurrent_rpcs
    return grpc.aio.server(
        interceptors=[_CheckCaller(credentials), _TakeTrace()],
        options=[
            *_SERVER_OPTIONS,
            ("grpc.max_receive_message_length", limits.max_request_bytes),
            ("grpc.max_concurrent_streams", most),
        ],
        maximum_concurrent_rpcs=most,
    )


def bind_port(
    server: grpc.aio.Server, listen: Listen, credentials: Credentials, field: str = "port"
) -> int:
    """Listen where ``listen`` says, with TLS where ``credentials`` have it; the port.

    Raises:
        ConfigError: the port is taken, and ``field`` names the setting it comes from; or a file of
            TLS cannot be used.
    """
    address = join_address(listen.bind, listen.port)
    tls = credentials.tls
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, _server_tls(tls))
    except RuntimeError as error:
        raise _cannot_listen(listen, field) from error
    if bound == 0:
        raise _cannot_listen(listen, field)
    return bound


def open_channel(
    address: str, credentials: Credentials, to: Role | None = None, *, server_name: str = ""
) -> grpc.aio.Channel:
    """A channel whose calls carry the secret; connects when first used.

    ``to`` is the role of who is called; None for ``credentials`` of no role.
    With TLS the peer shows a certificate for ``server_name``, or for the address where that is
    empty.

    Raises:
        ConfigError: a file of TLS cannot be used.
    """
    tls = credentials.tls
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    else:
        options: list[tuple[str, str | int]] = [*_CHANNEL_OPTIONS]
        if server_name:
            options.append(("grpc.ssl_target_name_override", server_name))
        channel = grpc.aio.secure_channel(address, _channel_tls(tls), options=options)
    return _AuthorizedChannel(channel, credentials.shown_to(to))


def _cannot_listen(listen: Listen, field: str) -> ConfigError:
    return ConfigError(field, listen.port, f"cannot listen on {listen.bind}", "a free port")


def _server_tls(files: TlsFiles) -> grpc.ServerCredentials:
    renewed = Renewed(files.paths, lambda: _server_certificate(files))
    return grpc.dynamic_ssl_server_credentials(
        renewed.current(),
        renewed.current,  # asked for at every handshake
        require_client_authentication=files.mutual,
    )


def _server_certificate(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    pem = files.read()
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.cert)], root_certificates=pem.ca if files.mutual else None
    )


def _channel_tls(files: TlsFiles) -> grpc.ChannelCredentials:
    pem = files.read()
    if not files.mutual:
        return grpc.ssl_channel_credentials(root_certificates=pem.ca)
    return grpc.ssl_channel_credentials(
        root_certificates=pem.ca, private_key=pem.key, certificate_chain=pem.cert
    )


@contextlib.contextmanager
def map_rpc_errors(peer: str, request_id: str = "") -> Iterator[None]:
    """Turn the gRPC errors of calls to ``peer`` into ours; the message names the peer."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        is_broken = (error.code(), error.details()) == _BROKEN_CALL
        error_type = PeerLostError if is_broken else _STATUS_ERRORS.get(error.code(), InternalError)
        text = f"{peer}: {error.code().name}: {error.details()}"
        raise error_type(text, request_id=request_id) from error
    except grpc.aio.UsageError as error:
        # The channel was closed under the call, because its peer is gone.
        raise PeerLostError(f"{peer}: {error}", request_id=request_id) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Nobody cancelled who waits: the same, of a call that was under way.
        text = f"{peer}: the connection was closed"
        raise PeerLostError(text, request_id=request_id) from error
