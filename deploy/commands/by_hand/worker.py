"""``tandem worker ROLE``: the ranks of one instance that live on this host, without Ray."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.config.file import cluster_credentials, dump_config, load_config
from runtime.net.credentials import Listen
from runtime.net.roles import Role as Callee

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.commands.common import Subparsers
    from deploy.hosts.plan import HostPlace, RankPlan
    from runtime.config import ClusterConfig
    from runtime.net.credentials import Credentials

_GRACE_S = 30.0
_PORT_BASE = 9000
_EXAMPLE = """\
examples; the secret comes from the environment's TANDEM_SECRET, or from FILE:
  a decode worker of one host:
    tandem worker decode --config FILE --instance decode-0 --routers 10.0.0.1:8100 --host 10.0.0.2
  the second of two hosts of another:
    tandem worker decode --config FILE --instance decode-1 --hosts 2 --host-index 1 \\
        --rendezvous 10.0.0.3:9301 --routers 10.0.0.1:8100 --host 10.0.0.4

Of local rank R, gRPC is on port P + R (--port-base P), /metrics, /health and /ready on P + 100 + R,
KV on P + 200 + R, routers' short calls on P + 310 + R. /health and /ready of all of them are on
--health-port: 200 while every rank lives and is well, and while routers send requests to every
rank.

Ends with 0 when it was told to stop and all ranks left in order, with 1 when a rank has died (the
others are ended, too), with 2 when a setting cannot work.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``worker``."""
    parser = commands.add_parser(
        "worker",
        help="run one worker's ranks on this host, without Ray",
        description="Starts all ranks of an instance that live on this host, a GPU each, and stays "
        "until they are told to stop or one of them dies. Nothing is started again: that is for "
        "whoever started this. SIGTERM drains; a second one ends at once.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("role", choices=("prefill", "decode"), metavar="ROLE", help="what it does")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a TOML file")
    parser.add_argument("--instance", required=True, metavar="NAME", help="unlike all others")
    _add_place(parser)
    _add_network(parser)
    parser.add_argument(
        *("--grace",), type=float, default=_GRACE_S, metavar="S", help="to drain (%(default)g s)"
    )
    parser.set_defaults(command=run)


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("an instance on several hosts")
    group.add_argument("--hosts", type=int, default=1, metavar="N", help="how many (1)")
    group.add_argument("--host-index", type=int, default=0, metavar="K", help="which one (0)")
    group.add_argument("--rendezvous", default="", metavar="HOST:PORT", help="of the first one")


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--routers",
        required=True,
        metavar="ADDRESS[,...]",
        help="HOST:PORT of each router's control port; dns+HOST:PORT: of all addresses of a name",
    )
    group.add_argument("--host", default="", help="listen here (cluster.host)")
    group.add_argument("--advertise", default="", metavar="HOST", help="as others are told")
    group.add_argument(
        *("--port-base",), type=int, default=_PORT_BASE, metavar="P", help="(%(default)d)"
    )
    group.add_argument("--health-port", type=int, default=0, metavar="H", help="(P + 300)")


def run(arguments: argparse.Namespace) -> int:
    """Run them until told to stop."""
    from deploy.checkpoint.model_folder import with_model
    from deploy.hosts.plan import check_ports, plan_ranks
    from runtime.logging import configure_logging

    configure_logging(arguments.instance)
    config = with_model(load_config(arguments.config), weights=True)
    if config.decode.leaves_drafts_open and config.decode.device_memory_gib:
        # Of memory ranks do not know; the rest they decide alike. Loads what models are made of.
        from deploy.checks.drafts import with_drafts_decided

        config = with_drafts_decided(config)
    place, health = _place_of(arguments, config)
    credentials = cluster_credentials(config, Callee(arguments.role))
    with tempfile.TemporaryDirectory(prefix="tandem-worker-") as folder:
        config_path = Path(folder) / "config.toml"
        plans = plan_ranks(place, config, config_path, credentials)
        check_ports(place, len(plans))
        config_path.write_text(dump_config(config), encoding="utf-8")
        return asyncio.run(_serve(place, plans, credentials, health))


def _place_of(arguments: argparse.Namespace, config: ClusterConfig) -> tuple[HostPlace, Listen]:
    """Where the ranks listen, and where we tell of their health."""
    from deploy.hosts.plan import HostPlace, HostPorts
    from deploy.plan import Role

    host, advertise = arguments.host, arguments.advertise
    if not host:
        host, advertise = config.cluster.host, advertise or config.cluster.advertise
    listen = Listen(bind=host, advertise=advertise)
    place = HostPlace(
        role=Role(arguments.role),
        instance=arguments.instance,
        host_index=arguments.host_index,
        num_hosts=arguments.hosts,
        rendezvous=arguments.rendezvous,
        routers=arguments.routers,
        listen=listen,
        ports=HostPorts(base=arguments.port_base),
        grace_s=arguments.grace,
    )
    port = arguments.health_port or place.ports.health
    return place, dataclasses.replace(listen, port=port)


async def _serve(
    place: HostPlace, plans: Sequence[RankPlan], credentials: Credentials, listen: Listen
) -> int:
    from deploy.hosts.health import HostHealth
    from deploy.hosts.ranks import HostRanks

    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: hurry.set() if stop.is_set() else stop.set())
    ranks = HostRanks(plans, credentials, place.listen.reach, place.grace_s)
    server = HostHealth(ranks)
    try:
        await server.start(listen)
        return await ranks.run(stop, hurry)
    finally:
        await server.stop()
