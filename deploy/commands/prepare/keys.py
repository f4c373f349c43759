"""``tandem keys ...``: make, list and remove the API keys of a router's file."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.commands.common import add_command
from deploy.control.events import Event, EventKind, append_event, who
from deploy.errors import ClusterError
from router.keys.file import add_to_file, read_keys, remove_from_file
from router.keys.record import KeyLimits, KeyRecord, Right, hash_key, new_key
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_ADD = """
tandem keys add alice --file keys.toml
tandem keys add bob --file keys.toml --rpm 60 --tpm 100000 --concurrency 8
tandem keys add ops --file keys.toml --right operations        # for the console and /status
tandem keys add alice-2 --file keys.toml --cache-salt alice    # a second key of the same tenant
tandem keys add guest --file keys.toml --expires 2027-01-31T00:00:00Z
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``keys`` and what it can do."""
    parser = add_command(
        commands,
        "keys",
        help="make and remove API keys",
        description="Change the file that router.keys_file names. Routers follow it while they "
        "run, within seconds.",
        examples="""
tandem keys add alice --file keys.toml --rpm 60
tandem keys list --file keys.toml
""",
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_adding(verbs)
    listing = add_command(
        verbs,
        "list",
        help="print the names and limits of a file",
        examples="tandem keys list --file keys.toml",
    )
    _add_file(listing)
    listing.set_defaults(command=run_list)
    removing = add_command(
        verbs,
        "remove",
        help="take a key out of a file",
        description="Its requests that run go on to their end; new ones are answered 401.",
        examples="tandem keys remove alice --file keys.toml",
    )
    removing.add_argument("name", metavar="NAME", help="of the key")
    _add_file(removing)
    removing.set_defaults(command=run_remove)


def _add_adding(verbs: Subparsers) -> None:
    parser = add_command(
        verbs,
        "add",
        help="make a key and print it, once",
        description="Draw a key, print it, and write its hash into the file. The key itself is "
        "kept nowhere: whoever loses it needs another one.",
        examples=_ADD,
    )
    parser.add_argument("name", metavar="NAME", help="of its owner, for logs and metrics")
    _add_file(parser)
    limits = (
        ("--rpm", "requests a minute"),
        ("--tpm", "tokens a minute, of prompts and outputs together"),
        ("--concurrency", "requests at once"),
    )
    for option, what in limits:
        text = f"most {what} (default: no limit)"
        parser.add_argument(option, type=int, default=0, metavar="N", help=text)
    parser.add_argument(
        *("--model",),
        action="append",
        default=[],
        metavar="NAME",
        dest="models",
        help="a model that it may use, as often as you like (default: all)",
    )
    parser.add_argument(
        *("--tier",),
        action="append",
        default=[],
        metavar="NAME",
        dest="tiers",
        help="a tier of service that it may have, as often as you like (default: the default "
        "one, those behind it, and open ones); the first is that of requests which name none",
    )
    parser.add_argument(
        *("--right",),
        action="append",
        choices=[right.value for right in Right],
        dest="rights",
        help="what it is for, as often as you like (default: inference)",
    )
    parser.add_argument(
        "--cache-salt",
        default="",
        metavar="TENANT",
        help="keys with the same one share cached prefixes (default: NAME, so with no other key)",
    )
    parser.add_argument(
        *("--expires",),
        default="",
        metavar="TIME",
        help="from then on it is refused, for example 2027-01-31T00:00:00Z (default: never)",
    )
    parser.set_defaults(command=run_add)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, required=True, metavar="FILE", help="as router.keys_file names it"
    )


def run_add(arguments: argparse.Namespace) -> int:
    """Print a new key on standard output, and what to do with it on standard error."""
    key = new_key()
    now = time.time()
    record = KeyRecord(
        name=arguments.name,
        sha256=hash_key(key),
        models=tuple(arguments.models),
        cache_salt=arguments.cache_salt,
        tiers=tuple(arguments.tiers),
        tier=arguments.tiers[0] if arguments.tiers else "",
        rights=frozenset(map(Right, arguments.rights or [Right.INFERENCE])),
        limits=KeyLimits(
            requests_per_minute=arguments.rpm,
            tokens_per_minute=arguments.tpm,
            max_concurrent_requests=arguments.concurrency,
        ),
        expires=_time_of(arguments.expires),
    )
    if record.has_expired(now):
        raise ConfigError("--expires", arguments.expires, "is over", "a time to come")
    add_to_file(arguments.file, record)
    print(key)
    told = f"the key of {record.name!r}, shown this once; {arguments.file} has its hash"
    print(told, file=sys.stderr)
    _put_on_record(arguments.file, f"added {record.name}: {', '.join(_told(record, now))}")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print a line a key."""
    now = time.time()
    for record in read_keys(arguments.file):
        print(" ".join([f"{record.name:<24}", *_told(record, now)]))
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Take a key out."""
    remove_from_file(arguments.file, arguments.name)
    _put_on_record(arguments.file, f"removed {arguments.name}")
    return 0


def _put_on_record(file: Path, text: str) -> None:
    """Append who has changed the keys, and how.

    Raises:
        ClusterError: it cannot be written; the change is made.
    """
    path = file.with_name(f"{file.name}.events.jsonl")
    event = Event(time=time.time(), kind=EventKind.KEYS, who=who(), text=text)
    try:
        append_event(path, event)
    except OSError as error:
        raise ClusterError(
            f"{path}: {error.strerror or error}, so that nothing tells of this: {text}. It is "
            "done. Fix: a file that can be appended to, and a line for it by hand"
        ) from error


def _time_of(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError as error:
        fix = "a date, a time and a zone, as 2027-01-31T00:00:00Z"
        raise ConfigError("--expires", text, "is no time", fix) from error


def _told(record: KeyRecord, now: float) -> list[str]:
    limits = {
        "requests/min": record.limits.requests_per_minute,
        "tokens/min": record.limits.tokens_per_minute,
        "at once": record.limits.max_concurrent_requests,
    }
    told = [f"{value} {what}" for what, value in limits.items() if value] or ["no limits"]
    if record.rights != {Right.INFERENCE}:
        told += [f"for {', '.join(right.value for right in Right if right in record.rights)}"]
    told += [f"models {', '.join(record.models)}"] if record.models else []
    told += [f"tiers {', '.join(record.tiers)}"] if record.tiers else []
    if record.end:
        told += [f"{'expired' if record.has_expired(now) else 'expires'} {record.end}"]
    return told + ([f"cache of {record.cache_salt}"] if record.cache_salt else [])
