"""gRPC as we use it: authenticated servers and channels, and their errors as ours.

Every call carries the cluster's secret; a server answers UNAUTHENTICATED to anything else.
Keepalive pings find a dead peer within seconds even where no packet says so. The stubs of grpc are
generic in their messages, which the interceptors do not look at: hence their Any.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Awaitable, Callable, Iterator
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

MAX_MESSAGE_BYTES = 64 * 2**20
_AUTHORIZATION = "authorization"
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
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers must never share a port silently.
    ("grpc.so_reuseport", 0),
]

_STATUS_ERRORS: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerLostError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: RequestCancelledError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
}


class _RequireSecret(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

        async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "the cluster's secret is missing or wrong"
            )

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        for key, value in handler_call_details.invocation_metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if key == _AUTHORIZATION and hmac.compare_digest(given, self._expected):
                return await continuation(handler_call_details)
        return self._refuse


def _with_secret(details: Any, secret: str) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    metadata.add(_AUTHORIZATION, f"Bearer {secret}")
    return details._replace(metadata=metadata)


# Two classes: grpc.aio files an interceptor under the first kind that it implements.
class _AddSecretToUnary(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_secret(client_call_details, self._secret), request)


class _AddSecretToStream(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    def __init__(self, secret: str) -> None:
        self._secret = secret

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(_with_secret(client_call_details, self._secret), request)


def create_server(secret: str) -> grpc.aio.Server:
    """A server that serves only callers with ``secret``."""
    return grpc.aio.server(interceptors=[_RequireSecret(secret)], options=_SERVER_OPTIONS)


def bind_port(server: grpc.aio.Server, host: str, port: int, field: str = "port") -> int:
    """Listen on ``host:port`` (0: any free one) and return the port.

    Raises:
        ConfigError: the port is taken; ``field`` names the setting it comes from.
    """
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(field, port, f"cannot listen on {host}", "a free port") from error
    if bound == 0:
        raise ConfigError(field, port, f"cannot listen on {host}", "a free port")
    return bound


def open_channel(address: str, secret: str) -> grpc.aio.Channel:
    """A channel whose calls carry ``secret``; connects when first used."""
    interceptors: list[Any] = [_AddSecretToUnary(secret), _AddSecretToStream(secret)]
    return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS, interceptors=interceptors)


@contextlib.contextmanager
def map_rpc_errors(peer: str, request_id: str = "") -> Iterator[None]:
    """Turn the gRPC errors of calls to ``peer`` into ours; the message names the peer."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        error_type = _STATUS_ERRORS.get(error.code(), InternalError)
        text = f"{peer}: {error.code().name}: {error.details()}"
        raise error_type(text, request_id=request_id) from error
    except grpc.aio.UsageError as error:
        # The channel was closed under the call, because its peer is gone.
        raise PeerLostError(f"{peer}: {error}", request_id=request_id) from error
