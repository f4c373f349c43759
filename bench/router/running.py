"""Starts what is measured: our router or another one, each before workers that compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from bench.router.load import HOST, Router
from deploy.checks.cluster import resolve_config
from deploy.ports import free_port
from runtime.config import ClusterConfig
from runtime.config.file import SECRET_VARIABLE, dump_config

READY_S = 60.0
ROOT = Path(__file__).parents[2]
PEER_MODEL = "bench"


@contextlib.contextmanager
def running_router(
    step_ms: float, *, context: int = 0, tree: Path | None = None, pin: bool = False, **section: int
) -> Iterator[Router]:
    """Router and workers as processes of their own, ended on exit.

    Args:
        step_ms: of the decode rank.
        context: tokens that the model claims to hold; 0: those that it does.
        tree: of the code that the router and the workers run; None: this one.
        pin: the router has the first core for itself, and all others, this process included, the
            rest.
        section: settings of the router.
    """
    built_in = ClusterConfig()
    changes = {"port": free_port(HOST), "control_port": 0, **section}
    router = dataclasses.replace(built_in.router, **changes)  # type: ignore[arg-type]
    config = resolve_config(dataclasses.replace(built_in, router=router))
    control = f"{HOST}:{config.router.control_port}"
    env = {**os.environ, SECRET_VARIABLE: "benchmark", "PYTHONPATH": str(tree or ROOT)}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder, contextlib.ExitStack() as s:
        if context:
            config = _with_context(config, Path(folder) / config.model.name, context)
        path = Path(folder) / "cluster.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        log = s.enter_context((Path(folder) / "log").open("w+b"))
        command = [sys.executable, "-m", "router", "--config", str(path)]
        router_process = s.enter_context(_process(log, env, command))
        if pin:
            _pin(router_process)
        options = ["--control", control, "--model", config.model.name, "--step-ms", str(step_ms)]
        stamps = Path(folder) / "stamps"
        options += ["--max-model-len", str(context or 4096), "--stamps", str(stamps)]
        workers = [sys.executable, "-m", "bench.router.workers", *options]
        s.enter_context(_process(log, env, workers))
        _wait_ready(config.router.port, "/ready", log)
        yield Router(
            config.router.port, config.model.name, router_process.pid, Path(log.name), stamps
        )


@contextlib.contextmanager
def running_peer(command: str, step_ms: float) -> Iterator[Router]:
    """Another router, started by ``command``, before two workers of OpenAI's HTTP API.

    In ``command`` {port}, {prefill} and {decode} stand for the router's port and the workers' URLs.
    """
    port, prefill, decode = (free_port(HOST) for _ in range(3))
    urls = {"prefill": f"http://{HOST}:{prefill}", "decode": f"http://{HOST}:{decode}"}
    words = [word.format(port=port, **urls) for word in shlex.split(command)]
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder, contextlib.ExitStack() as s:
        log = s.enter_context((Path(folder) / "log").open("w+b"))
        workers = [sys.executable, "-m", "bench.router.http_workers", "--model", PEER_MODEL]
        workers += [f"--prefill={prefill}", f"--decode={decode}", f"--step-ms={step_ms}"]
        env = dict(os.environ)
        s.enter_context(_process(log, {**env, "PYTHONPATH": str(ROOT)}, workers))
        _wait_ready(decode, "/health", log)
        process = s.enter_context(_process(log, env, words, folder=Path.cwd()))
        _wait_ready(port, "/readiness", log)
        yield Router(port, PEER_MODEL, process.pid, Path(log.name))


def _with_context(config: ClusterConfig, folder: Path, context: int) -> ClusterConfig:
    """``config`` with a copy of its model, without weights, that claims another context."""
    shutil.copytree(config.model.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "config.json"
    shape = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**shape, "max_position_embeddings": context}), encoding="utf-8")
    model = dataclasses.replace(config.model, path=str(folder))
    return dataclasses.replace(config, model=model)


@contextlib.contextmanager
def _process(
    log: IO[bytes], env: dict[str, str], command: Sequence[str], *, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run in `folder`, or in one without code: `-m` looks there first."""
    folder = folder or Path(str(log.name)).parent
    process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _pin(router: subprocess.Popen[bytes]) -> None:
    """Before it has threads: they have what they begin with, and so has what is started here."""
    first, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(router.pid, {first})
    os.sched_setaffinity(0, others)


def _wait_ready(port: int, path: str, log: IO[bytes]) -> None:
    async def wait() -> None:
        async with asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(
                        urllib.request.urlopen, f"http://{HOST}:{port}{path}", timeout=5
                    )
                    return
                await asyncio.sleep(0.1)

    try:
        asyncio.run(wait())
    except TimeoutError:
        log.seek(0)
        raise RuntimeError(f"not ready:\n{log.read().decode()}") from None
