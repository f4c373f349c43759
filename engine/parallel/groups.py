"""Process groups: the collectives that layers and dispatchers use, and how ranks find each other.

A `RankGroup` is one axis as seen from one rank. The key idea: a group of one rank is a real object
whose collectives return their input, so a layer never asks whether it runs in parallel.
`torch.distributed` is used here only.
"""

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from engine.kernels.fused.dependent import break_chain
from engine.parallel.dims import ParallelDims
from engine.parallel.pair_rows import PairRows
from engine.parallel.peer_exchange import PeerGathers, PeerSums
from engine.parallel.pending import Pending, Ready, Then
from runtime.errors import PeerLostError
from runtime.net.credentials import is_loopback

# The two collectives of every layer are asked of the group itself: the library's functions around
# them look, on every call, for cases that there are none of here.
# Renamed in torch 2.13, where the old names warn; what they do is the same.
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "_allgather_base"
_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "_reduce_scatter_base"
)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A collective of the library in flight; keeps the input alive until it has been read."""

    name: str
    work: dist.Work
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        with _PeersAlive(self.name):
            self.work.wait()
        break_chain()  # on a GPU the library's own stream has run it
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """One axis: `size` ranks of which this is number `rank`. Collectives must be called by all.

    Attributes:
        rank: of this process.
        size: ranks.
        sums: reduce-scatters what it takes; None for the library alone.
        gathers: gathers what it takes, beside `sums`; None for the library alone.
    """

    rank: int = 0
    size: int = 1
    sums: PeerSums | None = None
    gathers: PeerGathers | None = None
    _group: dist.ProcessGroup | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The library's group, for libraries that want it; None where there is one rank."""
        return self._group

    def exchanging_by(self, sums: PeerSums, gathers: PeerGathers) -> "RankGroup":
        """Return the same ranks, which sum and gather by these what they take."""
        return replace(self, sums=sums, gathers=gathers)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, in place, of a tensor of equal shape on all of them."""
        return self.start_all_reduce(tensor).wait()

    def start_all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """Start to sum over the ranks, in place."""
        if self.size == 1:
            return Ready(tensor)
        with _PeersAlive("all_reduce"):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return _Launched("all_reduce", work, tensor, tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ranks' tensors of equal shape, concatenated along dimension 0."""
        return self.start_all_gather(tensor).wait()

    def start_all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        """Start to concatenate the ranks' tensors of equal shape along dimension 0.

        Where `gathers` are open the result is to be read before the next sum is sent.
        """
        if self.size == 1:
            return Ready(tensor)
        if self.gathers is None:
            return self._start_library_all_gather(tensor)
        if self.gathers.takes(tensor):
            return self.gathers.start(tensor)
        return Then(self._start_library_all_gather(tensor), self._meet)

    def _start_library_all_gather(self, tensor: Tensor) -> Pending[Tensor]:
        source = tensor.contiguous()
        gathered = source.new_empty((self.size * source.shape[0], *source.shape[1:]))
        options = AllgatherOptions()
        options.asyncOp = True
        with _PeersAlive("all_gather"):
            work = getattr(self._group, _ALL_GATHER)(gathered, source, options)
        return _Launched("all_gather", work, gathered, source)

    def start_reduce_scatter(
        self, tensor: Tensor, own: Pending[Tensor] | None = None
    ) -> Pending[Tensor]:
        """Start to sum [T, ...] over the ranks; each gets its T / size rows, in rank order.

        Args:
            tensor: of equal shape on all ranks.
            own: [T / size, ...], added to this rank's rows.
        """
        if self.sums is not None and self.sums.takes(tensor):
            summing = self.sums.start(tensor, own)
        else:
            summing = self._start_library_reduce_scatter(tensor)
            if own is not None:
                summing = Then(summing, lambda total: total.add_(own.wait()))
        return self._meeting(summing)

    def sums_pairs(self, pairs: PairRows) -> bool:
        """Return whether `start_sum_of_pairs` can be called: the same on all ranks."""
        return self.sums is not None and self.sums.takes_pairs(pairs)

    def start_sum_of_pairs(
        self, pairs: PairRows, own: Pending[Tensor] | None = None
    ) -> Pending[Tensor]:
        """Start to sum each token's weighted rows over the ranks; each gets its own T tokens.

        As a sum per token, rounded, and `start_reduce_scatter` of those, bit by bit.

        Args:
            pairs: for which `sums_pairs` says yes.
            own: [T, D], added to this rank's tokens.
        """
        assert self.sums is not None
        return self._meeting(self.sums.start_pairs(pairs, own))

    def _meeting(self, summing: Pending[Tensor]) -> Pending[Tensor]:
        """Return a sum that all ranks have come to when it is received."""
        return summing if self.gathers is None else Then(summing, self._meet)

    def _meet(self, received: Tensor) -> Tensor:
        """Say that every rank has come to what was received here."""
        assert self.gathers is not None
        self.gathers.met()
        return received

    def _start_library_reduce_scatter(self, tensor: Tensor) -> Pending[Tensor]:
        if self.size == 1:
            return Ready(tensor)
        assert tensor.shape[0] % self.size == 0, tensor.shape
        source = tensor.contiguous()
        share = source.new_empty((source.shape[0] // self.size, *source.shape[1:]))
        options = ReduceScatterOptions()  # a sum
        options.asyncOp = True
        with _PeersAlive("reduce_scatter"):
            work = getattr(self._group, _REDUCE_SCATTER)(share, source, options)
        return _Launched("reduce_scatter", work, share, source)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's values, in place, in a tensor of equal shape on all ranks."""
        if self.size > 1:
            with _PeersAlive("broadcast"):
                dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def all_to_all(
        self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> Tensor:
        """Send consecutive runs of rows to the ranks in turn, and return those received.

        Args:
            rows: [sum(num_sent), ...].
            num_sent: per rank, how many of the rows it gets; zero is fine.
            num_received: per rank, how many rows come from it (its `num_sent` for this rank).

        Returns:
            [sum(num_received), ...], ordered by sending rank.
        """
        return self.start_all_to_all(rows, num_sent, num_received).wait()

    def start_all_to_all(
        self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> Pending[Tensor]:
        """Start an `all_to_all`."""
        if self.size == 1:
            return Ready(rows)
        source = rows.contiguous()
        received = source.new_empty((sum(num_received), *source.shape[1:]))
        with _PeersAlive("all_to_all"):
            work = dist.all_to_all_single(
                received,
                source,
                list(num_received),
                list(num_sent),
                group=self._group,
                async_op=True,
            )
        return _Launched("all_to_all", work, received, source)

    def barrier(self) -> None:
        """Return once every rank has called."""
        if self.size > 1:
            with _PeersAlive("barrier"):
                dist.barrier(group=self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The axes of one rank. `ProcessGroups()` is a process that runs alone.

    Attributes:
        dims: of the axes.
        tp_group: ranks that share heads.
        ep_group: ranks that share experts.
        boot_group: all ranks, on the host, and patient: to meet in after work of different length.
    """

    dims: ParallelDims = field(default_factory=ParallelDims)
    tp_group: RankGroup = field(default_factory=RankGroup)
    ep_group: RankGroup = field(default_factory=RankGroup)
    boot_group: RankGroup = field(default_factory=RankGroup)

    @property
    def rank(self) -> int:
        """Of this process in the instance."""
        return self.dims.rank

    def destroy(self) -> None:
        """Leave the groups; collectives may not be called afterwards."""
        if self.dims.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def init_process_groups(
    dims: ParallelDims,
    rendezvous: str,
    *,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    boot_timeout_s: float | None = None,
) -> ProcessGroups:
    """Meet the other ranks of the instance; returns when all of them have called.

    Args:
        dims: axis lengths and this rank's number.
        rendezvous: "host:port" on which rank 0 listens; unused by an instance of one rank.
        backend: "gloo" on CPUs, "nccl" on GPUs.
        timeout_s: seconds for every later collective.
        boot_timeout_s: seconds for the meeting, and for those in the boot group; None for the same.
            The death of a rank is noticed at once all the same, because its sockets close.

    Raises:
        PeerLostError: not all ranks came in time, or rank 0 cannot be reached.
    """
    if dims.world_size == 1:
        return ProcessGroups(dims=dims)
    # A collective that overlaps with GEMMs has to get SMs between two of them,
    # not after all that are queued.
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    patience = timedelta(seconds=timeout_s if boot_timeout_s is None else boot_timeout_s)
    with _PeersAlive(f"meeting at {rendezvous}"), _gloo_kept_to(rendezvous):
        store = _open_store(rendezvous, dims, patience)
        dist.init_process_group(
            backend,
            store=store,
            world_size=dims.world_size,
            rank=dims.rank,
            timeout=timedelta(seconds=timeout_s),
        )
        boot = dist.new_group(backend="gloo", timeout=patience)
    # Every axis that is longer than 1 spans the whole instance (see ParallelDims), so one
    # communicator serves both: tp and ep collectives follow one another in program order.
    everyone = dist.group.WORLD
    return ProcessGroups(
        dims=dims,
        tp_group=RankGroup(rank=dims.tp_rank, size=dims.tp, _group=everyone),
        ep_group=RankGroup(rank=dims.ep_rank, size=dims.ep, _group=everyone),
        boot_group=RankGroup(rank=dims.rank, size=dims.world_size, _group=boot),
    )


@contextlib.contextmanager
def _gloo_kept_to(rendezvous: str) -> Iterator[None]:
    """Have gloo listen on the loopback interface where the ranks meet there.

    Else it listens at the address that this host's name stands for. It asks when a group is made;
    what this process starts later must not inherit the answer.
    """
    host = rendezvous.rpartition(":")[0].strip("[]")
    is_ours = is_loopback(host) and sys.platform == "linux" and _GLOO_INTERFACE not in os.environ
    if is_ours:
        os.environ[_GLOO_INTERFACE] = "lo"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_GLOO_INTERFACE]


def _open_store(rendezvous: str, dims: ParallelDims, patience: timedelta) -> Any:
    """The store at `rendezvous`, which rank 0 serves, and which keeps to that interface.

    By itself the library would listen on all of them, and asks nobody for a secret.
    """
    host, _, port = rendezvous.rpartition(":")
    host = host.strip("[]")
    listener = None
    if dims.rank == 0:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.create_server((host, int(port)), family=family) as server:
                listener = server.detach()  # the store closes it
        except OSError as error:
            raise PeerLostError(f"cannot listen at {rendezvous}: {error.strerror}") from error
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        int(port),
        dims.world_size,
        dims.rank == 0,
        timeout=patience,
        master_listen_fd=listener,
    )


def open_side_group(groups: ProcessGroups, *, timeout_s: float) -> RankGroup:
    """Return all ranks of an instance once more, for collectives on host memory beside the steps.

    All ranks call, before steps run. One thread of each uses it.

    Args:
        groups: of the instance.
        timeout_s: seconds for every collective.
    """
    dims = groups.dims
    if dims.world_size == 1:
        return RankGroup()
    with _PeersAlive("opening a group beside the steps"):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return RankGroup(rank=dims.rank, size=dims.world_size, _group=group)


class _PeersAlive:
    """Turns the library's RuntimeError (peer closed, timed out) into ours."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise PeerLostError(f"another rank was lost in {self._what}: {error}") from error


def agree_on_epoch(group: RankGroup) -> int:
    """Draw the epoch of this life of an instance: rank 0's draw, known to all ranks.

    Returns:
        A random number in [1, 2**63): it travels as a signed integer.
    """
    drawn = torch.tensor([secrets.randbits(63) or 1], dtype=torch.int64)
    return int(group.all_gather(drawn)[0])
