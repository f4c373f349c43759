"""``tandem certificates``: an authority of one's own, and a certificate for each host."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import add_command
from deploy.errors import WrongArgumentError
from runtime.net.roles import Role

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_DAYS = 825
_HOST = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]*")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_FOLDER = "/etc/tandem"
_EXAMPLES = """
tandem certificates --hosts 10.0.0.1,10.0.0.2 --out tls
tandem certificates --hosts 10.0.0.1 --role prefill --out tls
tandem certificates --hosts 10.0.0.3 --out tls              # one more, of the same authority
tandem certificates --hosts 10.0.0.1 --also llm.example --out tls
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``certificates``."""
    parser = add_command(
        commands,
        "certificates",
        help='make certificates for tls.mode = "files"',
        description="Makes an authority, unless DIR has one, and a certificate and a key for each "
        'host, for clusters whose processes are started one by one: with tls.mode = "auto" '
        "`tandem up` does all this itself.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--hosts",
        required=True,
        metavar="A,B,...",
        help="the address or name of each, as the others call it (--advertise, else --host)",
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME",
        help="a name or address that each of them has, too, such as that of a load balancer",
    )
    parser.add_argument(
        *("--role",),
        action="append",
        choices=[role.value for role in Role],
        default=[],
        dest="roles",
        help="processes of this role alone can use them, as often as you like (default: all)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if need be")
    parser.add_argument(
        *("--days",), type=int, default=_DAYS, metavar="N", help="they are good for (%(default)d)"
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and say what to do with them."""
    from deploy.certificates import Authority, make_certificates

    hosts = _hosts_of("--hosts", arguments.hosts.split(","))
    also = _hosts_of("--also", arguments.also)
    if arguments.days < 1:
        raise WrongArgumentError(f"--days {arguments.days}: no time at all. Fix: 1 or more")
    folder: Path = arguments.out
    roles = tuple(map(Role, arguments.roles))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = Authority.read(folder)
        is_new = authority is None
        if authority is None:
            authority = Authority.make()
            authority.save(folder)
        for host in hosts:
            names = tuple(dict.fromkeys((host, *also, *_LOCAL)))
            make_certificates(folder / host, names, authority, days=arguments.days, roles=roles)
    except OSError as error:
        raise WrongArgumentError(
            f"--out {folder}: {error.strerror}. Fix: a folder that you may write to"
        ) from error
    print(_what_next(folder, hosts, is_new=is_new))
    return 0


def _hosts_of(flag: str, words: list[str]) -> list[str]:
    hosts = list(dict.fromkeys(word.strip() for word in words))
    for host in hosts:
        if not _HOST.fullmatch(host) or host in ("0.0.0.0", "::"):
            raise WrongArgumentError(
                f"{flag} {host!r}: is no address or name that anybody could call. "
                "Fix: for example 10.0.0.1,10.0.0.2"
            )
    return hosts


def _what_next(folder: Path, hosts: list[str], *, is_new: bool) -> str:
    made = "an authority and " if is_new else ""
    number = "a certificate" if len(hosts) == 1 else f"{len(hosts)} certificates"
    copies = [f"    scp -p {folder / host}/*.pem {_scp_host(host)}:{_FOLDER}/" for host in hosts]
    lines = [
        f"made {made}{number} in {folder}",
        "",
        f"Give each host its three files, which the user of Tandem alone may read, in {_FOLDER}:",
        *copies,
        "and all hosts the same lines in their configuration:",
        "    [tls]",
        '    mode = "files"',
        *(f'    {name} = "{_FOLDER}/{name}.pem"' for name in ("cert", "key", "ca")),
        "",
        f"{folder / 'ca-key.pem'} signs for further hosts, and anew before these end. Whoever "
        "reads it can be any process of the cluster: keep it where no such process is.",
    ]
    return "\n".join(lines)


def _scp_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
