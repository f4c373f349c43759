"""Routers and workers that somebody starts on each host with one command, without Ray."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.hosts.hosts import ROOT, Hosts
from tests.waiting import wait_until

START_S = 240.0
_ENVIRONMENT = {"TANDEM_SECRET": "a secret of tests", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Command:
    """A ``tandem`` command that stays, on one host."""

    process: subprocess.Popen[bytes]
    log_path: Path

    def said(self) -> str:
        """All that it and its ranks have written."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def ended(self, timeout_s: float) -> int:
        """Its exit status, once it has ended."""
        wait_until(lambda: self.process.poll() is not None, f"it ends:\n{self.said()}", timeout_s)
        return int(self.process.returncode)

    def signal(self, number: int) -> None:
        """Tell it, and nobody else."""
        os.kill(self.process.pid, number)


@dataclass(slots=True)
class ByHand:
    """What was started on ``hosts``; all of it ends with the block."""

    hosts: Hosts
    folder: Path
    configs: Mapping[str, str]
    """TOML, by host."""
    _commands: list[Command] = field(default_factory=list)

    def __enter__(self) -> ByHand:
        self.folder.mkdir(parents=True, exist_ok=True)
        for host, text in self.configs.items():
            self._config_path(host).write_text(text, encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.hosts.hosts:
            self.hosts.end_processes(name)
        for command in self._commands:
            command.process.wait()

    def _config_path(self, host: str) -> Path:
        return self.folder / f"{host}.toml"

    @property
    def base_url(self) -> str:
        """Of the router, on host "a"."""
        return f"http://{self.hosts['a'].address}:8000"

    def router(self) -> Command:
        """``tandem router`` on host "a"."""
        return self._start("a", "router")

    def worker(self, host: str, role: str, instance: str, *words: str) -> Command:
        """``tandem worker`` on a host."""
        routers = f"{self.hosts['a'].address}:8100"
        place = ("--instance", instance, "--routers", routers, *words)
        return self._start(host, "worker", role, *place)

    def wait_ready(self, *hosts: str) -> None:
        """Until routers send requests to every rank of ``hosts``."""
        for host in hosts:
            wait_until(
                lambda host=host: self._is_ready(host), f"{host} serves:\n{self.said()}", START_S
            )

    def said(self) -> str:
        """The end of what everybody wrote."""
        return "\n".join(command.said()[-3000:] for command in self._commands)

    def _is_ready(self, host: str) -> bool:
        """As whoever looks after it asks ``tandem worker``."""
        url = f"http://{self.hosts[host].address}:9300/ready"
        try:
            with urllib.request.urlopen(url, timeout=10):
                return True
        except OSError:  # not there yet, or not ready
            return False

    def _start(self, host: str, *words: str) -> Command:
        path = self.folder / f"{len(self._commands)}-{host}-{words[0]}.log"
        own = ("--config", str(self._config_path(host)), "--host", self.hosts[host].address)
        command = [sys.executable, "-m", "deploy", *words, *own]
        with path.open("wb") as log, contextlib.ExitStack() as stack:
            process = subprocess.Popen(
                self.hosts.command(host, *command),
                stdin=stack.enter_context(open(os.devnull, "rb")),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**self.hosts.environment, **_ENVIRONMENT},
            )
        self._commands.append(Command(process, path))
        return self._commands[-1]
