"""Where a process listens, and what proves that two processes belong to one cluster.

``Listen`` is an interface and the address that others are told; ``Credentials`` are the secrets of
the cluster and, with TLS, the certificate that this process shows and the authority that it asks of
others. `runtime.rpc.grpc_calls` puts both into gRPC; HTTP and our own sockets take ``ssl`` contexts
from here.
Nothing here imports gRPC: whoever only plans a cluster does not load it.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.net.roles import (
    Role,
    Roles,
    accepted_by,
    role_secret,
    roles_of_names,
    roles_of_secret,
    shown_to,
)
from runtime.rpc.renewal import Renewed

_WILDCARDS = ("0.0.0.0", "::")


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means all interfaces, and so is no address that anybody could call."""
    return host in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach ``host``. Other names are not looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join_address(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a process listens, and where others are told to find it."""

    bind: str
    """Interface: an address of this machine, or "0.0.0.0" or "::" for all."""
    advertise: str = ""
    """The address that peers are told; empty: ``bind``."""
    port: int = 0
    """0: any free one."""

    def __post_init__(self) -> None:
        check_reachable(self.bind, self.advertise)

    @property
    def reach(self) -> str:
        """The host that peers are told."""
        return self.advertise or self.bind

    def address(self, port: int) -> str:
        """``host:port`` as peers are told, of a ``port`` that is bound."""
        return join_address(self.reach, port)


def check_reachable(bind: str, advertise: str) -> None:
    """Refuse to tell peers of "all interfaces", which is no address.

    Raises:
        ConfigError: says to set ``cluster.advertise``.
    """
    if is_wildcard(advertise):
        problem = "is no address that peers could call"
        raise ConfigError("cluster.advertise", advertise, problem, "this host's address or name")
    if is_wildcard(bind) and not advertise:
        problem = "listens on all interfaces, and is no address that peers could call"
        fix = "set cluster.advertise to this host's address or name"
        raise ConfigError("cluster.host", bind, problem, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """A certificate, its key, and the authority whose certificates are believed; PEM files."""

    cert: str
    key: str
    ca: str
    mutual: bool = True
    """Callers of gRPC and of our own sockets show a certificate too."""
    http_mutual: bool = False
    """So do HTTP clients."""

    @property
    def paths(self) -> tuple[str, str, str]:
        """All of them."""
        return self.cert, self.key, self.ca

    def read(self) -> TlsPem:
        """What is in the files now, for gRPC.

        Raises:
            ConfigError: a file cannot be read, or the key is not the certificate's.
        """
        _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self, trust=True)
        return TlsPem(
            cert=Path(self.cert).read_bytes(),
            key=Path(self.key).read_bytes(),
            ca=Path(self.ca).read_bytes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPem:
    """The contents of ``TlsFiles``."""

    cert: bytes
    key: bytes = field(repr=False)
    ca: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a process shows to the others of its cluster, and what it asks of them."""

    secret: str = field(repr=False)
    """The cluster's, or what a role has of it (`runtime.net.roles`)."""
    previous_secret: str = field(default="", repr=False)
    """Accepted as well, while processes change from one secret to another; empty: none."""
    tls: TlsFiles | None = None
    """None: plain text."""
    role: Role | None = None
    """What this process is; None: all of them, by the cluster's secret itself."""

    @property
    def asks_for_certificates(self) -> bool:
        """Whether callers of gRPC and of our own sockets must show one."""
        return self.tls is not None and self.tls.mutual

    @classmethod
    def of_secret(cls, secret: str) -> Credentials:
        """A secret and no TLS."""
        return cls(secret=secret)

    def of_role(self, role: Role) -> Credentials:
        """Those of a process of ``role``, with no more of the secrets than it needs.

        Raises:
            ConfigError: a secret is another role's already.
        """
        secret = role_secret(self.secret, role)
        previous = role_secret(self.previous_secret, role) if self.previous_secret else ""
        return replace(self, secret=secret, previous_secret=previous, role=role)

    def shown_to(self, server: Role | None) -> str:
        """What is sent with every call to a process of the role ``server``."""
        if self.role is None:
            return self.secret
        assert server is not None, "whom it calls decides what it shows"
        return shown_to(self.secret, self.role, server)

    def roles_of(self, given: bytes) -> Roles:
        """Whose secret ``given`` is; empty: nobody's, after the same time for every wrong one."""
        found: Roles = frozenset()
        for secret in (self.secret, self.previous_secret):
            if secret:
                found |= roles_of_secret(given, accepted_by(secret, self.role))
        return found

    def server_ssl_context(self) -> ssl.SSLContext | None:
        """For the listening end of our own sockets; None without TLS. It follows the files.

        Raises:
            ConfigError: a file cannot be used.
        """
        return None if self.tls is None else _server_context(self.tls, ask=self.tls.mutual)

    def client_ssl_context(self) -> ssl.SSLContext | None:
        """For the calling end of our own sockets and of HTTP; None without TLS.

        The peer must show a certificate for the address that was called.

        Raises:
            ConfigError: a file cannot be used.
        """
        if self.tls is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load(context, self.tls, trust=True)
        return context

    def check_certificate(self, host: str) -> None:
        """Refuse a certificate that peers which call us at ``host`` would not believe: for want of
        a name, of the authority, of its time or of its purpose. Nothing without TLS.

        Raises:
            ConfigError: says what a peer would say.
        """
        server, client = self.server_ssl_context(), self.client_ssl_context()
        if self.tls is None or server is None or client is None:
            return
        try:
            roles = _shake_hands_with_oneself(server, client, host)
        except ssl.SSLError as error:
            problem = f"is refused by whoever calls this process at {host} ({_verdict(error)})"
            fix = f"a certificate of tls.ca, for both ends, whose subjectAltName has {host}"
            raise ConfigError("tls.cert", self.tls.cert, problem, fix) from error
        if self.role is not None and self.role not in roles:
            named = " and ".join(sorted(roles)) or "of nobody"
            problem = f"names the role {named}: this is a {self.role}"
            fix = f"one of `tandem certificates --role {self.role}`"
            raise ConfigError("tls.cert", self.tls.cert, problem, fix)

    def http_ssl_context(self) -> ssl.SSLContext | None:
        """For the listening end of HTTP; None without TLS. It follows the files.

        Raises:
            ConfigError: a file cannot be used.
        """
        return None if self.tls is None else _server_context(self.tls, ask=self.tls.http_mutual)


def _server_context(files: TlsFiles, *, ask: bool) -> ssl.SSLContext:
    """A context that shows, at each handshake, the certificate that is in the files by then."""
    context = _context_of_now(files, ask=ask)
    renewed = Renewed(files.paths, lambda: _context_of_now(files, ask=ask))

    # Called at every handshake, also where the client names no server.
    def follow(connection: ssl.SSLObject | ssl.SSLSocket, _: object, __: object) -> None:
        connection.context = renewed.current()

    context.sni_callback = follow
    return context


def _context_of_now(files: TlsFiles, *, ask: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(context, files, trust=ask)
    if ask:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def roles_of_peer(certificate: Mapping[str, Any] | None) -> Roles:
    """The roles that the ``certificate`` of a peer names, as ``SSLSocket.getpeercert`` tells it.

    One without names of roles stands for all; None, and one that was not looked at: nobody's.
    """
    if not certificate:
        return frozenset()
    names = certificate.get("subjectAltName", ())
    return roles_of_names(name for kind, name in names if kind == "URI")


def _shake_hands_with_oneself(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> Roles:
    """The roles that our own certificate names, as callers see it."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = client.wrap_bio(to_client, to_server, server_hostname=host)
    listening = server.wrap_bio(to_server, to_client, server_side=True)
    waiting = [calling, listening]
    while waiting:
        for end in tuple(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:  # for what the other end says next
                continue
    return roles_of_peer(calling.getpeercert())


def _verdict(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason or str(error)


def _load(context: ssl.SSLContext, files: TlsFiles, *, trust: bool) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase must fail: nobody is there to be asked for it.
        context.load_cert_chain(files.cert, files.key, password="")
    except (OSError, ValueError) as error:
        problem = f"cannot be used with tls.key = {files.key!r} ({_reason(error)})"
        fix = "a PEM certificate and its key without a passphrase"
        raise ConfigError("tls.cert", files.cert, problem, fix) from error
    if trust:
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            problem = f"cannot be used ({_reason(error)})"
            raise ConfigError("tls.ca", files.ca, problem, "a PEM certificate") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "no PEM"
    return getattr(error, "strerror", None) or str(error)
