"""``[kv_transfer]``: how KV gets from prefill to decode."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.checks import at_least, one_of
from runtime.errors import ConfigError
from runtime.faults import parse_faults
from runtime.net.credentials import is_loopback

OPEN_TRANSPORTS = ("nixl", "mooncake")
"""Their libraries listen by themselves, and ask nobody for a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSection:
    """``[kv_transfer]``: how KV gets from prefill to decode."""

    transport: str = "auto"
    """One of "auto" (NIXL where it loads, else loopback), "loopback" (TCP), "nixl", "mooncake"."""
    mooncake_protocol: str = "tcp"
    """One of "tcp", "rdma", "nvlink"."""
    mooncake_devices: str = ""
    """Network cards that Mooncake uses, a comma list; empty: all."""
    allow_open_data_ports: bool = False
    """Let NIXL and Mooncake serve other machines, though they open ports of their own that ask
    nobody for a secret."""
    num_sender_threads: int = 2
    """Per prefill rank."""
    layers_per_group: int = 0
    """KV of so many layers is pushed as soon as it is written; 0: all layers of a chunk at once."""
    transfer_timeout_s: float = 60.0
    """From a ticket, or the last sign that its prompt is being computed, to complete KV."""
    quarantine_timeout_s: float = 30.0
    """Blocks of a cancelled ticket wait so long for their writer; then its connection is fenced."""
    num_metadata_slots: int = 256
    """Tickets that a decode rank can have open at once."""
    faults: str = ""
    """For tests of a whole cluster: what to break on purpose, as "delay=0.2@0.05,fail=0.02,seed=7"
    (see ``runtime.faults``); empty: nothing."""

    def __post_init__(self) -> None:
        one_of("kv_transfer.transport", self.transport, ("auto", "loopback", "nixl", "mooncake"))
        one_of("kv_transfer.mooncake_protocol", self.mooncake_protocol, ("tcp", "rdma", "nvlink"))
        at_least("kv_transfer.num_sender_threads", self.num_sender_threads, 1)
        at_least("kv_transfer.layers_per_group", self.layers_per_group, 0)
        at_least("kv_transfer.transfer_timeout_s", self.transfer_timeout_s, 0.001)
        at_least("kv_transfer.quarantine_timeout_s", self.quarantine_timeout_s, 0.0)
        at_least("kv_transfer.num_metadata_slots", self.num_metadata_slots, 1)
        parse_faults(self.faults)

    def check_data_ports(self, transport: str, host: str) -> None:
        """Refuse open ports of a library where others than this machine may reach them.

        ``transport`` is what ``self.transport`` stands for, ``host`` the interface of the process.

        Raises:
            ConfigError: names the ways out.
        """
        if self.allow_open_data_ports or is_loopback(host) or transport not in OPEN_TRANSPORTS:
            return
        meant = f" means {transport}," if transport != self.transport else " is a library"
        raise ConfigError(
            "kv_transfer.transport",
            self.transport,
            f"{meant.strip()} whose data ports ask nobody for a secret, and cluster.host {host} "
            "lets others reach them",
            "kv_transfer.allow_open_data_ports = true where a firewall lets nobody else in, or "
            'kv_transfer.transport = "loopback"',
        )
