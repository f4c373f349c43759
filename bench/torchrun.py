"""Where the ranks of torchrun meet: at a port of their own, which they agree on in its store.

The launcher's store listens at ``MASTER_PORT`` itself and says so in the environment; a store that
rank 0 opens there finds the port taken. Ranks that were started by hand meet at ``MASTER_PORT``.
"""

from __future__ import annotations

from collections.abc import Mapping

from deploy.ports import free_port

_AGENT_STORE, _RESTARTS = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"


def rendezvous_of(environment: Mapping[str, str]) -> str:
    """Return "host:port" at which rank 0 may listen; all ranks call.

    Args:
        environment: with ``RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    host, port = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    if environment.get(_AGENT_STORE) != "True":
        return f"{host}:{port}"
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, int(port), is_master=False)
    key = f"tandem/port/{environment.get(_RESTARTS, '0')}"
    if environment["RANK"] == "0":
        store.set(key, str(free_port(host)))
    return f"{host}:{store.get(key).decode()}"
