"""Which of this machine's addresses lies in the network that the configuration names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from runtime.errors import ConfigError

_FIELD = "cluster.network"
_FIX = 'a CIDR such as "10.0.0.0/16", or the name of an interface, that every host has'

Interfaces = Mapping[str, Sequence[str]]
"""Addresses by the name of the interface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAddress:
    """An address of this machine."""

    interface: str
    address: str


def check_network(network: str) -> None:
    """Refuse what can be neither a CIDR nor the name of an interface.

    Raises:
        ConfigError: says so.
    """
    if "/" in network:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError as error:
            raise ConfigError(_FIELD, network, f"is no network ({error})", _FIX) from error


def own_address(network: str) -> OwnAddress:
    """The address of this machine in ``network``, a CIDR or an interface's name.

    Raises:
        ConfigError: it has none; names this host and what it has.
    """
    return choose_address(network, own_interfaces(), socket.gethostname())


def choose_address(network: str, interfaces: Interfaces, host_name: str) -> OwnAddress:
    """The first of ``interfaces`` that is in ``network``; IPv4 first where it is a name.

    Raises:
        ConfigError: none is.
    """
    for interface, address in _candidates(network, interfaces):
        return OwnAddress(interface=interface, address=address)
    had = ", ".join(f"{name} {' '.join(own)}" for name, own in interfaces.items() if own)
    problem = f"host {host_name} has no address in it; it has {had or 'none'}"
    raise ConfigError(_FIELD, network, problem, _FIX)


def interface_of(address: str, interfaces: Interfaces) -> str:
    """The interface that has ``address``; empty where none has."""
    return next((name for name, own in interfaces.items() if address in own), "")


def own_interfaces() -> dict[str, list[str]]:
    """What this machine has; addresses of a link alone are left out."""
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        wanted = [one for one in entries if one.family in (socket.AF_INET, socket.AF_INET6)]
        addresses = [one.address for one in sorted(wanted, key=lambda one: one.family)]
        found[name] = [one for one in addresses if "%" not in one]
    return found


def address_towards(host: str) -> str:
    """The address of this machine on the way to ``host``; empty where there is no way.

    Nothing is sent.
    """
    try:
        ((family, _, _, _, target), *_) = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(target)
            return str(asking.getsockname()[0])
    except OSError:
        return ""


def _candidates(network: str, interfaces: Interfaces) -> list[tuple[str, str]]:
    everything = [(name, one) for name, own in interfaces.items() for one in own]
    if "/" not in network:
        return [(name, one) for name, one in everything if name == network]
    wanted = ipaddress.ip_network(network, strict=False)
    return [(name, one) for name, one in everything if ipaddress.ip_address(one) in wanted]
