"""One process a rank, met on this host; or the rank that torchrun has started.

Started by hand, this process spawns the others and waits: the first failure ends them all, and they
die with it. Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) this process is one rank, and only
rank 0 has a result. No Ray.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar, cast

from bench.torchrun import rendezvous_of
from deploy.devices import NO_MULTICAST
from deploy.errors import ClusterError
from deploy.ports import free_port
from engine.boot.jit_cache import use_jit_cache
from runtime.errors import ConfigError, TandemError
from runtime.process import die_with_parent

_HOST = "127.0.0.1"

Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank a process is.

    Attributes:
        rank: among all.
        world_size: how many there are.
        local_rank: which of this host's devices it takes.
        rendezvous: "host:port" at which rank 0 listens.
    """

    rank: int
    world_size: int
    local_rank: int
    rendezvous: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Generic[Options, Result]):
    """What every rank does: a function of a module, so that a new process finds it."""

    run: Callable[[Options, RankPlace], Result | None]
    options: Options
    world_size: int
    device: str


def launch(job: Job[Options, Result]) -> Result | None:
    """Run the job on its ranks; the result of rank 0, None on other ranks of torchrun.

    Raises:
        ConfigError: fewer devices than ranks, or torchrun has started another number.
        ClusterError: a rank failed; its own message is on stderr.
    """
    place = _torchrun_place(os.environ)
    if place is not None:
        if place.world_size != job.world_size:
            problem = f"torchrun has started {place.world_size} processes"
            raise ConfigError("tp x dp", job.world_size, problem, "the same number")
    elif job.device == "cuda":
        _check_devices(job.world_size)
    if job.device == "cuda":
        _prepare_environment()
    if place is not None:
        return job.run(job.options, place)
    rendezvous = f"{_HOST}:{free_port(_HOST)}"
    if job.world_size == 1:
        return job.run(
            job.options, RankPlace(rank=0, world_size=1, local_rank=0, rendezvous=rendezvous)
        )
    return _spawn(job, rendezvous)


def _prepare_environment() -> None:
    """Before the kernel libraries are imported, here or in a process that we start."""
    use_jit_cache()
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


def _check_devices(world_size: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < world_size:
        problem = f"this host has {found} CUDA device(s), one is needed per rank"
        fix = f"at most {found}"
        if not found:
            fix = "a machine with GPUs (`tandem doctor` says what is here)"
        raise ConfigError("tp x dp", world_size, problem, f"{fix}, or --device cpu")


def _torchrun_place(environment: Mapping[str, str]) -> RankPlace | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    return RankPlace(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        rendezvous=rendezvous_of(environment),
    )


def _spawn(job: Job[Options, Result], rendezvous: str) -> Result:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    ranks: list[BaseProcess] = []
    try:
        for rank in range(job.world_size):
            place = RankPlace(
                rank=rank, world_size=job.world_size, local_rank=rank, rendezvous=rendezvous
            )
            process: BaseProcess = context.Process(
                target=_run_rank, args=(job, place, sender, os.getpid())
            )
            process.start()
            ranks.append(process)
        sender.close()  # so that the last rank's end is the pipe's
        return cast(Result, _collect(ranks, receiver))
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(ranks: list[BaseProcess], receiver: Connection) -> object:
    """Wait for rank 0's result and for everybody's end; fail with the first that fails."""
    results: list[object] = []
    waiting = {process.sentinel: number for number, process in enumerate(ranks)}
    while waiting:
        ready = wait([*([] if results else [receiver]), *waiting])
        if receiver in ready:
            with contextlib.suppress(EOFError):  # all ended; their states say why
                results.append(receiver.recv())
        for sentinel, number in list(waiting.items()):
            if sentinel in ready:
                del waiting[sentinel]
                _check_end(number, ranks[number])
    if not results:
        raise ClusterError("no rank gave a result; their messages are above")
    return results[0]


def _check_end(number: int, process: BaseProcess) -> None:
    process.join()
    if process.exitcode:
        raise ClusterError(
            f"rank {number} ended with status {process.exitcode}; its message is above"
        )


def _run_rank(
    job: Job[Options, Result], place: RankPlace, sender: Connection, parent_pid: int
) -> None:
    """The life of a spawned rank."""
    die_with_parent(parent_pid)
    try:
        result = job.run(job.options, place)
    except (ConfigError, TandemError) as error:
        print(f"error: rank {place.rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    if place.rank == 0:
        sender.send(result)
    sender.close()
