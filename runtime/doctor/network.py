"""A host's name and addresses, and the ports that a configuration wants."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from runtime.config import ClusterConfig
from runtime.doctor.finding import Finding, Verdict
from runtime.net.credentials import is_loopback

Resolve = Callable[[str], str]


def check_name(
    config: ClusterConfig,
    hostname: str,
    resolve: Resolve = socket.gethostbyname,
) -> Iterator[Finding]:
    """Whether peers on other hosts could call what this host calls itself."""
    try:
        address = resolve(hostname)
    except OSError as error:
        yield Finding(
            check="host name",
            verdict=Verdict.WARNING,
            text=f"{hostname} has no address ({error}): libraries that look it up wait or fail",
            fix=f"a line for {hostname} in /etc/hosts, or a DNS entry",
        )
        return
    is_alone = is_loopback(config.cluster.reach)
    if is_loopback(address) and not is_alone:
        yield Finding(
            check="host name",
            verdict=Verdict.WARNING,
            text=f"{hostname} is {address}, which other hosts cannot call",
            fix=f"give {hostname} its address of the cluster's network in /etc/hosts",
        )
    else:
        text = f"{hostname} is {address}"
        yield Finding(check="host name", verdict=Verdict.OK, text=text)


def check_free_ports(config: ClusterConfig) -> Iterator[Finding]:
    """Whether the router's ports are free; a cluster that runs has them, rightly."""
    hosts = {"port": config.http_host, "control_port": config.cluster.host}
    for field, host in hosts.items():
        port = getattr(config.router, field)
        if not port:
            continue
        problem = _taken(host, port)
        if problem:
            yield Finding(
                check="ports",
                verdict=Verdict.NOTE,
                text=f"router.{field} = {port} is taken ({problem}): by a cluster that runs?",
                fix=f"`tandem status`; else set router.{field} to a free port (0: any)",
            )
        else:
            text = f"router.{field} = {port} is free on {host}"
            yield Finding(check="ports", verdict=Verdict.OK, text=text)


def _taken(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""
