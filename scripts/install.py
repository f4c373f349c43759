"""Install a lock of ``requirements/`` into a virtual environment, and Tandem with it.

::

    python -m scripts.install .venv requirements/dev.txt --editable . [ARGUMENTS OF PIP]

It runs in the environment that has pip and uv, and makes the other one where it is not there. uv
installs, from where pip would: what pip's configuration and environment say of indexes, folders and
certificates holds, and so do the arguments. Where they offer a CPU build of PyTorch, of the version
that ``requirements/runtime.txt`` has, it is taken in place of PyPI's and of the gigabytes of CUDA
that this one needs. Every file but that build is checked against its hash in the lock.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.locks import ROOT, pins, without_cuda

_HERE = Path(sys.executable).parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where packages come from, in pip's words."""

    index_url: str = ""
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str = ""
    trusted_hosts: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """Of uv. Additional indexes are not among them: what a lock names is in the main one."""
        flags = [f"--default-index={self.index_url}"] if self.index_url else []
        flags += [f"--find-links={place}" for place in self.find_links]
        flags += [f"--allow-insecure-host={host}" for host in self.trusted_hosts]
        return flags + (["--no-index"] if self.no_index else [])

    def flags_of_torch(self) -> list[str]:
        """Of uv, with additional indexes: the highest version of all that they have, as for pip."""
        flags = [f"--index={url}" for url in self.extra_index_urls]
        return [*self.flags(), *flags, "--index-strategy=unsafe-best-match"]

    def environment(self) -> dict[str, str]:
        """Of uv, which reads OpenSSL's variable in place of pip's."""
        return dict(os.environ) | ({"SSL_CERT_FILE": self.cert} if self.cert else {})


def read_sources(config: str, arguments: Sequence[str]) -> Sources:
    """What ``pip config list`` says, and above it the arguments that pip would be given.

    Raises:
        ValueError: for an argument of pip that says nothing of where packages come from.
    """
    told = _read_config(config)
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("-i", "--index-url", default=told.get("index-url", ""))
    parser.add_argument(
        "--extra-index-url", action="extend", nargs=1, default=_words(told, "extra-index-url")
    )
    parser.add_argument(
        "-f", "--find-links", action="extend", nargs=1, default=_words(told, "find-links")
    )
    parser.add_argument("--no-index", action="store_true", default=_is_on(told.get("no-index", "")))
    parser.add_argument("--cert", default=told.get("cert", ""))
    parser.add_argument(
        "--trusted-host", action="extend", nargs=1, default=_words(told, "trusted-host")
    )
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ValueError(
            f"{' '.join(unknown)}: not among the arguments of pip that are taken. Fix: "
            "--index-url, --extra-index-url, --find-links, --no-index, --cert or --trusted-host"
        )
    return Sources(
        index_url=args.index_url,
        extra_index_urls=tuple(args.extra_index_url),
        find_links=tuple(args.find_links),
        no_index=args.no_index,
        cert=args.cert,
        trusted_hosts=tuple(args.trusted_host),
    )


def _read_config(config: str) -> dict[str, str]:
    """Options by name: a section for ``install`` counts more than one for all, a variable most."""
    told: dict[str, str] = {}
    lines = [line.partition("=") for line in config.splitlines() if "=" in line]
    for section in ("global.", "install.", ":env:."):
        for key, _, value in lines:
            if key.startswith(section):
                told[key.removeprefix(section)] = str(ast.literal_eval(value))
    return told


def _words(told: dict[str, str], name: str) -> list[str]:
    return told.get(name, "").split()


def _is_on(value: str) -> bool:
    return value.lower() in {"1", "true", "yes", "on", "y", "t"}


def install(
    environment: Path,
    lock: Path,
    project: Sequence[str],
    sources: Sources,
    *,
    cuda: bool,
    compiled: bool,
) -> None:
    """Install ``lock`` and then ``project`` into ``environment``, which is made if it is not there.

    Args:
        environment: the folder of a virtual environment
        lock: a file of ``requirements/``
        project: arguments of uv that name Tandem, or none
        sources: where packages come from
        cuda: whether PyTorch is that of the lock, whatever ``sources`` offer
        compiled: whether all modules are compiled, for who runs them cannot write (an image)

    Raises:
        subprocess.CalledProcessError: something could not be installed; uv has said what.
    """
    if not (environment / "pyvenv.cfg").exists():
        _uv(sources, "venv", "--quiet", "--python", sys.executable, str(environment))
    into = ["install", "--quiet", "--python", str(environment), "--no-deps"]
    into += ["--compile-bytecode"] if compiled else []
    text = lock.read_text(encoding="utf-8")
    torch = "" if cuda else _cpu_build(environment, sources)
    if torch:
        print(f"with {torch}, a CPU build of PyTorch", flush=True)
        _uv(sources, "pip", *into, *sources.flags_of_torch(), torch)
        text = without_cuda(text)
    checked = ["--require-hashes", "--requirements", "-"]
    _uv(sources, "pip", *into, *sources.flags(), *checked, given=text)
    if project:
        _uv(sources, "pip", *into, "--no-build-isolation", *project)


def _cpu_build(environment: Path, sources: Sources) -> str:
    """The CPU build of PyTorch that ``sources`` offer, as ``torch==version``; else nothing."""
    lock = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    wanted = next(pin for pin in pins(lock) if pin.startswith("torch=="))
    found = _uv(
        sources,
        *("pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate"),
        *(f"--python={environment}", *sources.flags_of_torch(), "-"),
        given=wanted,
    ).strip()
    return found if found.endswith("+cpu") else ""


def _uv(sources: Sources, *arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [str(_HERE / "uv"), *arguments],
        env=sources.environment(),
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def main() -> int:
    """Install; status 1 where it could not be done, with uv's words above ours."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("environment", type=Path)
    parser.add_argument("lock", type=Path)
    parser.add_argument("--editable", metavar="FOLDER", help="Tandem, in place")
    parser.add_argument("--copy", metavar="FOLDER", help="Tandem, as a copy")
    parser.add_argument("--cuda", action="store_true", help="with PyTorch of the lock alone")
    parser.add_argument("--compile", action="store_true", help="compile all modules")
    args, of_pip = parser.parse_known_args()
    project = ["--editable", args.editable] if args.editable else [args.copy] if args.copy else []
    asked = [sys.executable, "-m", "pip", "config", "list"]
    config = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    try:
        sources = read_sources(config, of_pip)
        install(
            args.environment,
            args.lock,
            project,
            sources,
            cuda=args.cuda,
            compiled=args.compile,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
    except subprocess.CalledProcessError:
        print(
            f"error: the package index does not give what {args.lock} names (above: which). "
            'Fix: another index, in pip\'s configuration or by make PIP_ARGS="--index-url URL"',
            file=sys.stderr,
        )
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
