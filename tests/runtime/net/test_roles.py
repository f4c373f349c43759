"""Who may call what, by secrets and by certificates: the table, and each pair over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import uvloop
from google.protobuf.descriptor import ServiceDescriptor
from hypothesis import given
from hypothesis import strategies as st

from deploy.certificates import Authority, make_certificates
from deploy.cli import main
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, Listen, TlsFiles
from runtime.net.roles import (
    ALL_ROLES,
    CALLERS,
    SERVERS,
    URI,
    Role,
    accepted_by,
    accepting_key,
    derived,
    refusal,
    role_secret,
    roles_of_names,
    roles_of_secret,
    shown_to,
)
from runtime.pb import prefill_pb2
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.call_stream import CallStream, Method
from runtime.rpc.grpc_calls import bind_port, caller_roles, create_server, open_channel

HOST = "127.0.0.1"
ROOT = "the secret of a cluster"
FILES = ("cache", "controller", "decode", "experts", "keys", "prefill", "registry")
SECRETS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
ROLES = st.sampled_from(list(Role))


def services() -> Iterator[tuple[str, ServiceDescriptor, Any]]:
    """Of all protocols: the service's name, what describes it, and its module."""
    for name in FILES:
        module = importlib.import_module(f"runtime.pb.{name}_pb2_grpc")
        messages = importlib.import_module(f"runtime.pb.{name}_pb2")
        for service, described in messages.DESCRIPTOR.services_by_name.items():
            yield service, described, module


OURS = {"Http", "Kv"}
"""Not of gRPC."""


def test_the_table_has_every_call_of_every_protocol_and_no_other() -> None:
    there = {name: {one.name for one in found.methods} for name, found, _ in services()}
    assert {name: set(calls) for name, calls in CALLERS.items() if name not in OURS} == there
    assert set(SERVERS) == set(CALLERS)
    assert all(callers for calls in CALLERS.values() for callers in calls.values())


def test_no_worker_may_act_as_a_router_or_as_the_controller() -> None:
    for role in (Role.PREFILL, Role.DECODE):
        mine = [(s, calls[m]) for s, calls in CALLERS.items() for m in calls if role in calls[m]]
        assert all({Role.ROUTER, Role.CONTROLLER}.isdisjoint(callers) for _, callers in mine)
        assert {service for service, _ in mine} <= {"Registry", "Prefill", "Decode", "Kv"}


def test_a_call_that_is_not_in_the_table_is_for_nobody() -> None:
    assert refusal("Decode", "Dance", ALL_ROLES).startswith("Decode.Dance is for nobody")
    assert refusal("Dance", "Reserve", ALL_ROLES)
    text = "Decode.Reserve is for router, and the caller is prefill and decode"
    assert refusal("Decode", "Reserve", frozenset({Role.PREFILL, Role.DECODE})) == text


@given(SECRETS, ROLES, ROLES)
def test_a_role_can_do_with_its_own_secret_what_it_could_with_the_clusters(
    root: str, role: Role, other: Role
) -> None:
    own = role_secret(root, role)
    assert role_secret(own, role) == own
    assert root not in own or len(root) < 16
    assert accepting_key(own, role) == accepting_key(root, role)
    calls = {s for s, m in CALLERS.items() if any(role in r for r in m.values())}
    if other in {server for service in calls for server in SERVERS[service]}:
        shown = shown_to(own, role, other)
        assert shown == shown_to(root, role, other)
        accepted = accepted_by(role_secret(root, other), other)
        assert roles_of_secret(shown.encode(), accepted) == {role}
        assert roles_of_secret(shown.encode(), accepted_by(root, other)) == {role}
    else:
        assert shown_to(own, role, other) == ""


@given(SECRETS, ROLES, ROLES)
def test_what_a_process_holds_is_good_for_its_own_role_alone(
    root: str, role: Role, server: Role
) -> None:
    """All that it has, and all that it is shown, towards servers of another role."""
    held = role_secret(root, role)
    words = [held, *(part.partition("=")[2] for part in held.split("/")[1:])]
    words += [word.decode() for word, _ in accepted_by(held, role)]
    found = [roles_of_secret(word.encode(), accepted_by(root, server)) for word in words]
    allowed = {role} if server is not role else set(Role)
    assert set().union(*found) <= allowed
    with_itself = roles_of_secret(root.encode(), accepted_by(held, role))
    assert with_itself == frozenset()
    assert derived(root, "ray") not in words


@given(SECRETS, SECRETS, ROLES)
def test_another_clusters_secret_is_nobodys(root: str, other: str, role: Role) -> None:
    if root == other:
        return
    for caller in Role:
        shown = shown_to(other, caller, role).encode()
        assert roles_of_secret(shown, accepted_by(root, role)) == frozenset()


def test_the_secret_of_another_role_is_refused_by_name() -> None:
    for wrong in (role_secret, accepting_key, accepted_by):
        with pytest.raises(ConfigError, match=r"of role prefill, and this is of role decode.*Fix"):
            wrong(role_secret(ROOT, Role.PREFILL), Role.DECODE)
    mine = Credentials(secret=role_secret(ROOT, Role.PREFILL), role=Role.PREFILL)
    assert mine.of_role(Role.PREFILL).secret == mine.secret
    with pytest.raises(ConfigError):
        mine.of_role(Role.CONTROLLER)


@given(st.lists(st.sampled_from([*(f"{URI}{role}" for role in Role), "urn:other", f"{URI}x"])))
def test_a_certificate_is_of_the_roles_that_it_names(uris: list[str]) -> None:
    named = {uri for uri in uris if uri.startswith(URI)}
    expected = {role for role in Role if f"{URI}{role}" in named} if named else ALL_ROLES
    assert roles_of_names(uris) == expected


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[Role | None, TlsFiles]:
    """One of each role, and one that names none, of one authority."""
    folder, authority = tmp_path_factory.mktemp("tls"), Authority.make()
    return {
        role: make_certificates(
            folder / f"{role}", (HOST,), authority, roles=(role,) if role else ()
        )
        for role in (*Role, None)
    }


class Anything:
    """Answers every call of every service, and remembers who was let in."""

    def __init__(self) -> None:
        self.let_in: list[tuple[str, frozenset[Role]]] = []

    def add(self, service: str, described: ServiceDescriptor, server: grpc.aio.Server) -> None:
        handlers = {}
        for method in described.methods:
            answer = _class_of(method.output_type)
            name = f"{service}.{method.name}"

            async def unary(_: Any, __: Any, name: str = name, answer: Any = answer) -> Any:
                self.let_in.append((name, caller_roles()))
                return answer()

            async def stream(_: Any, __: Any, name: str = name, answer: Any = answer) -> Any:
                self.let_in.append((name, caller_roles()))
                yield answer()

            kind = "unary_stream" if method.server_streaming else "unary_unary"
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            read = _class_of(method.input_type).FromString
            work = stream if method.server_streaming else unary
            handlers[method.name] = make(work, read, answer.SerializeToString)
        generic = grpc.method_handlers_generic_handler(described.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))


def _class_of(described: Any) -> Any:
    from google.protobuf.message_factory import GetMessageClass

    return GetMessageClass(described)


@asynccontextmanager
async def serving(credentials: Credentials) -> AsyncIterator[tuple[Anything, int]]:
    server, there = create_server(credentials), Anything()
    for name, described, _ in services():
        there.add(name, described, server)
    port = bind_port(server, Listen(bind=HOST), credentials)
    await server.start()
    yield there, port
    await server.stop(None)


async def let_in(there: Anything, port: int, credentials: Credentials, to: Role) -> set[str]:
    """The calls that are answered; every other one was refused by name."""
    begun = len(there.let_in)
    async with open_channel(f"{HOST}:{port}", credentials, to) as channel:
        for service, described, _ in services():
            for method in described.methods:
                call = getattr(
                    channel, "unary_stream" if method.server_streaming else "unary_unary"
                )(
                    f"/{described.full_name}/{method.name}",
                    request_serializer=lambda message: message.SerializeToString(),
                    response_deserializer=_class_of(method.output_type).FromString,
                )
                try:
                    answer = call(_class_of(method.input_type)(), timeout=60)
                    if method.server_streaming:
                        [message async for message in answer]
                    else:
                        await answer
                except grpc.aio.AioRpcError as error:
                    named = f"{service}.{method.name} is for " in str(error.details())
                    if error.code() is not grpc.StatusCode.PERMISSION_DENIED or not named:
                        raise
    return {name for name, _ in there.let_in[begun:]}


def allowed(role: Role) -> set[str]:
    return {
        f"{service}.{method}"
        for service, methods in CALLERS.items()
        for method, roles in methods.items()
        if role in roles and service not in OURS
    }


@pytest.mark.parametrize("holds", ["the cluster's secret", "its role's secret"])
async def test_each_role_is_let_in_by_its_secret_to_its_calls_alone(holds: str) -> None:
    of = {role: Credentials(secret=ROOT, role=role) for role in Role}
    if holds == "its role's secret":
        of = {role: Credentials.of_secret(ROOT).of_role(role) for role in Role}
    for server in Role:
        async with serving(of[server]) as (there, port):
            for caller in Role:
                if not of[caller].shown_to(server):
                    continue  # it has nothing to show there
                assert await let_in(there, port, of[caller], server) == allowed(caller)
        assert {roles for _, roles in there.let_in} <= {frozenset({role}) for role in Role}


async def test_each_role_is_let_in_by_its_certificate_to_its_calls_alone(
    certificates: dict[Role | None, TlsFiles],
) -> None:
    """The secret is the whole cluster's: the certificate alone tells them apart."""
    own = Credentials(secret=ROOT, tls=certificates[Role.DECODE], role=Role.DECODE)
    async with serving(own) as (there, port):
        for role, tls in certificates.items():
            caller = Credentials(secret=ROOT, tls=tls)
            names = {f"{s}.{d.name}" for s, found, _ in services() for d in found.methods}
            expected = names if role is None else allowed(role)
            assert await let_in(there, port, caller, Role.DECODE) == expected
        # Both must be of a role that may: a prefill with a stolen secret of routers is nobody.
        stolen = Credentials(secret=ROOT, tls=certificates[Role.PREFILL], role=Role.ROUTER)
        assert await let_in(there, port, stolen, Role.DECODE) == set()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_short_calls_have_the_same_rule(
    certificates: dict[Role | None, TlsFiles], new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def run(request: prefill_pb2.RunRequest, _: object) -> prefill_pb2.RunResponse:
        return prefill_pb2.RunResponse()

    async def alone(_: object) -> Any:
        raise grpc.aio.UsageError("not carried")

    async def ask(port: int, credentials: Credentials) -> str:
        stream = CallStream(f"{HOST}:{port}", credentials, Role.PREFILL)
        method = Method("Run", prefill_pb2.RunResponse.FromString, alone)
        try:
            await stream.start(method, prefill_pb2.RunRequest())
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            await stream.close()
        return "answered"

    async def try_all() -> None:
        for tls_of in ({}, certificates):
            own = Credentials(secret=ROOT, role=Role.PREFILL, tls=tls_of.get(Role.PREFILL))
            server = CallServer(own)
            server.carry("Prefill", Run=CarriedMethod(prefill_pb2.RunRequest.FromString, run))
            port = server.start(Listen(bind=HOST))
            for role in Role:
                for caller in (
                    Credentials(secret=ROOT, role=role, tls=tls_of.get(role)),
                    Credentials(secret=ROOT, tls=tls_of.get(role)),
                ):
                    said = await ask(port, caller)
                    is_known = caller.role is None and not tls_of
                    if role is Role.ROUTER or is_known:
                        assert said == "answered"
                    else:
                        assert said.startswith("PERMISSION_DENIED: Prefill.Run is for router, and")
            await server.stop(0.0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(try_all())


def test_a_command_prints_what_a_role_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_SECRET", ROOT)
    for role in Role:
        assert main(["secret", role]) == 0
        assert capsys.readouterr().out.strip() == role_secret(ROOT, role)
    monkeypatch.setenv("TANDEM_SECRET", role_secret(ROOT, Role.PREFILL))
    assert main(["secret", "controller"]) == 2
    assert "is the secret of role prefill" in capsys.readouterr().err
    monkeypatch.delenv("TANDEM_SECRET")
    assert main(["secret", "controller"]) == 2
    assert "no secret. Fix:" in capsys.readouterr().err


def test_a_worker_refuses_to_begin_with_anothers_certificate(
    certificates: dict[Role | None, TlsFiles],
) -> None:
    decode = Credentials(secret=ROOT, role=Role.DECODE, tls=certificates[Role.DECODE])
    decode.check_certificate(HOST)
    dataclasses.replace(decode, tls=certificates[None]).check_certificate(HOST)
    with pytest.raises(
        ConfigError, match=r"tls.cert = .* names the role prefill: this is a decode"
    ):
        dataclasses.replace(decode, tls=certificates[Role.PREFILL]).check_certificate(HOST)


def test_no_request_for_a_certificate_asks_for_a_role(tmp_path: Path) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.UniformResourceIdentifier(f"{URI}controller"), x509.DNSName("host")]
    request = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
        .decode()
    )
    signed = Authority.make().sign(request, (HOST,), roles=(Role.PREFILL,))
    cert = x509.load_pem_x509_certificate(signed.encode())
    found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.UniformResourceIdentifier) == [f"{URI}prefill"]
    assert found.get_values_for_type(x509.DNSName) == ["host"]


def test_calls_outside_of_a_server_are_everybodys() -> None:
    async def ask() -> frozenset[Role]:
        return caller_roles()

    assert asyncio.run(ask()) == ALL_ROLES
