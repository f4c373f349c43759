"""One rank of an exchange on its GPU: run by `test_nvlink_gpu` as a process of its own.

Usage: python -m tests.engine.parallel.nvlink_main RANK WORLD PORT OUTPUT [lost]

Random steps, eager and replayed from graphs of several batch sizes, each rank as it likes, while
products of random sizes keep the ranks at odds with each other; then steps in which one rank has
all it may have and the others padding, or nothing. Every result is compared bit by bit, with and
without records of who came when. Writes what was done as JSON. With `lost` the last rank stops
sending, and the others have to notice. Ranks share the GPUs that there are.
"""

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.parallel.device_waits import StepWaits
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup, init_process_groups
from engine.parallel.lost_peer import as_lost_peer
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.open import open_nvlink_buffer
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.pending import Ready

NUM_STEPS = 200
WAIT_SECONDS = 2
"""The patience of a rank that is to lose another."""
PATIENCE_S = 60.0
E4M3_NAN = 0x7F


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a rank brings to a step: small whole numbers, whose sums bfloat16 holds exactly."""

    rows: Fp8Rows
    ids: Tensor
    weights: Tensor
    own: Tensor

    def copy_from(self, other: "Batch") -> None:
        self.rows.data_TK.view(torch.uint8).copy_(other.rows.data_TK.view(torch.uint8))
        self.rows.scale_TG.copy_(other.rows.scale_TG)
        for mine, theirs in (
            (self.ids, other.ids),
            (self.weights, other.weights),
            (self.own, other.own),
        ):
            mine.copy_(theirs)


def draw(shape: NvlinkShape, num_tokens: int, seed: int) -> Batch:
    """Return a batch; equal seeds give equal batches, on all ranks."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def whole(least: int, most: int, *size: int) -> Tensor:
        return torch.randint(least, most + 1, size, device="cuda", generator=generator).float()

    size = shape.hidden_size
    scores = torch.rand(num_tokens, shape.num_experts, device="cuda", generator=generator)
    ids = scores.topk(shape.top_k, dim=1).indices
    is_lost = torch.rand(ids.shape, device="cuda", generator=generator) < 0.1
    return Batch(
        rows=Fp8Rows(
            data_TK=whole(-3, 3, num_tokens, size).to(torch.float8_e4m3fn),
            scale_TG=whole(1, 2, size // 128, num_tokens).t(),
        ),
        ids=torch.where(is_lost, -1, ids),
        weights=whole(1, 2, num_tokens, shape.top_k),
        own=whole(-64, 64, num_tokens, size).bfloat16(),
    )


def factor(experts: Tensor) -> Tensor:
    """Return what stands for an expert: 1 or -1; 0 for none."""
    signs = 1.0 - 2.0 * ((experts * 2654435761 >> 7) % 2)
    return torch.where(experts >= 0, signs, 0.0)


class Rank:
    """One rank and its dispatcher."""

    def __init__(
        self,
        group: RankGroup,
        shape: NvlinkShape,
        sizes: list[int],
        wait_seconds: int = 120,
        *,
        records: bool = False,
    ) -> None:
        self.group, self.shape = group, shape
        self.buffer = open_nvlink_buffer(group, shape, wait_seconds=wait_seconds, records=records)
        self.dispatcher = NvlinkDispatcher(self.buffer)
        self.matrix = torch.randn(2048, 2048, device="cuda").bfloat16()
        self.graphs: dict[int, tuple[Any, Batch, Tensor]] = {}
        for size in sizes:
            self._capture(size)

    def step(self, batch: Batch) -> Tensor:
        rows, handle = self.dispatch(batch).wait()
        out: Tensor = self.combine(batch, rows, handle).wait()
        return out

    def dispatch(self, batch: Batch) -> Any:
        return self.dispatcher.start_dispatch(batch.rows, batch.ids, batch.weights)

    def combine(self, batch: Batch, rows: Any, handle: Any) -> Any:
        """Run the experts, and start to bring their rows home."""
        num_local = self.shape.num_local_experts
        first = self.group.rank * num_local
        factors = factor(torch.arange(first, first + num_local, device="cuda"))
        groups = rows.data_LMD.float().unflatten(2, (-1, 128)) * rows.scale_LMG.unsqueeze(3)
        out = (groups.flatten(2) * factors[:, None, None]).bfloat16()
        return self.dispatcher.start_combine(out, handle, Ready(batch.own))

    def replay(self, batch: Batch) -> Tensor:
        """Run the graph of the batch's size."""
        graph, static, out = self.graphs[batch.ids.shape[0]]
        static.copy_from(batch)
        graph.replay()
        return out.clone()

    def is_right(self, batch: Batch, out: Tensor) -> bool:
        total = (factor(batch.ids) * batch.weights).sum(1, keepdim=True)
        rows = batch.rows.dequantize().nan_to_num(0.0)  # NaN only where nobody has to read it
        return torch.equal(out, (rows * total + batch.own.float()).bfloat16())

    def _capture(self, size: int) -> None:
        """All ranks capture as often, so all make as many transfers."""
        static = draw(self.shape, size, 0)
        for _ in range(2):
            self.step(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.step(static)
        self.graphs[size] = (graph, static, out)


def run(
    group: RankGroup, shape: NvlinkShape, sizes: list[int], *, records: bool
) -> dict[str, object]:
    """Make random steps; return how many were right."""
    rank = Rank(group, shape, sizes, records=records)
    common, own = random.Random(shape.hidden_size), random.Random(group.rank)
    right = count = 0
    began = time.monotonic()
    for number in range(NUM_STEPS):
        for _ in range(own.randint(0, 3)):
            rank.matrix[: own.randint(1, 2048)] @ rank.matrix
        if own.random() < 0.03:
            time.sleep(0.02)
        seed = 1000 * number + 10 * group.rank
        if common.random() < 0.25:  # two dispatches, then two combines
            batches = [
                draw(shape, own.randint(0, shape.max_tokens_per_rank), seed + i) for i in (1, 2)
            ]
            sent = [rank.dispatch(batch).wait() for batch in batches]
            outs = [
                rank.combine(batch, *arrived).wait()
                for batch, arrived in zip(batches, sent, strict=True)
            ]
        elif own.random() < 0.6:
            batches = [draw(shape, own.choice(sizes), seed)]
            outs = [rank.replay(batches[0])]
        else:
            batches = [draw(shape, own.randint(0, shape.max_tokens_per_rank), seed)]
            outs = [rank.step(batches[0])]
        for batch, out in zip(batches, outs, strict=True):
            right += int(rank.is_right(batch, out))
            count += 1
    torch.cuda.synchronize()
    rank.graphs.clear()
    rank.buffer.close()
    return {"right": right, "count": count, "seconds": time.monotonic() - began}


def pad(batch: Batch, num_rows: int) -> Batch:
    """Make the rows from there on padding: they choose no expert, and hold NaN."""
    batch.ids[num_rows:] = -1
    batch.rows.data_TK.view(torch.uint8)[num_rows:] = E4M3_NAN
    batch.rows.scale_TG[num_rows:] = torch.nan
    return batch


def run_lopsided(group: RankGroup, shape: NvlinkShape) -> dict[str, object]:
    """One rank after another has all tokens; the others replay padding, or bring nothing."""
    most = shape.max_tokens_per_rank
    rank = Rank(group, shape, [1, most], records=True)
    right = count = 0
    assert rank.buffer.waits is not None
    rank.buffer.waits.start_reading().take()
    began = time.monotonic()
    for turn in range(8 * group.size):
        is_busy, is_replayed = turn % group.size == group.rank, (turn // group.size) % 2 == 0
        # A rank that is not busy: padding alone, one token, or padding alone in the large size.
        size, num_rows = ((1, 0), (1, 1), (most, 0))[(turn + group.rank) % 3]
        if is_busy:
            size = num_rows = most
        if is_replayed or is_busy:
            batch = pad(draw(shape, size, 100 * turn + group.rank), num_rows)
            out = rank.replay(batch) if is_replayed else rank.step(batch)
        else:
            batch = draw(shape, num_rows, 100 * turn + group.rank)
            out = rank.step(batch)
        right += int(rank.is_right(batch, out))
        count += 1
    batch = pad(draw(shape, most, group.rank), most if group.rank == 0 else 0)
    rows, handle = rank.dispatch(batch).wait()
    sums = torch.stack((rows.num_rows_L.sum(), (batch.ids >= 0).sum())).cpu()
    came, chosen = group.all_gather(sums.unsqueeze(0)).sum(0).tolist()
    right += int(rank.is_right(batch, rank.combine(batch, rows, handle).wait()))
    right += int(came == chosen > 0)
    is_told = says_all(rank.buffer.waits.start_reading().take(), 8 * group.size + 1, group.rank)
    right += int(is_told)
    torch.cuda.synchronize()
    rank.graphs.clear()
    rank.buffer.close()
    return {"right": right, "count": count + 3, "seconds": time.monotonic() - began}


def says_all(waits: StepWaits, num_layers: int, rank: int) -> bool:
    """Return whether each transfer is recorded, with times that are possible; print them."""
    print(
        f"rank {rank}, us: own {(1e6 * waits.own_s).round(1).tolist()} "
        f"until first flags {(1e6 * waits.first_s).round(1).tolist()} "
        f"until last {(1e6 * waits.waits_s).round(1).tolist()}",
        flush=True,
    )
    return (
        waits.num_transfers == 2 * num_layers
        and bool((waits.own_s > 0).all())
        and bool((waits.waits_s < PATIENCE_S).all())
        and not waits.waits_s[:, rank].any()
        and bool((waits.first_s <= waits.waits_s).all())
    )


def shapes(world: int) -> dict[str, tuple[NvlinkShape, list[int]]]:
    """Return exchanges, and the sizes of the batches that are captured."""

    def shape(experts: int, tokens: int, hidden: int, top_k: int) -> NvlinkShape:
        return NvlinkShape(
            num_ranks=world,
            num_experts=experts,
            max_tokens_per_rank=tokens,
            hidden_size=hidden,
            top_k=top_k,
        )

    return {
        "small": (shape(6 * world, 13, 256, 3), [0, 1, 13]),
        "large": (shape(8 * world, 128, 7168, 8), [32, 128]),
    }


def lose(rank: Rank) -> dict[str, object]:
    """Wait for a rank that does not come; return what is known of it, and after how long.

    The rank's memory has to outlive the call: its destructor aborts the process after a trap.
    """
    batch = draw(rank.shape, 4, 0)
    assert rank.is_right(batch, rank.step(batch))  # compiled, and all are there
    rank.group.barrier()
    error = None
    began = time.monotonic()
    if rank.group.rank < rank.group.size - 1:
        try:
            rank.dispatch(batch).wait()
            torch.cuda.synchronize()
        except RuntimeError as caught:
            error = as_lost_peer(caught)
    seconds = time.monotonic() - began
    return {"error": "" if error is None else error.message, "seconds": seconds}


def end_after_trap(output: Path) -> None:
    """End as `worker.run` ends a rank that lost another: no destructor may run.

    The last rank, whose memory the others have mapped, goes when they have said what they saw.
    """
    end = time.monotonic() + PATIENCE_S
    first = output.with_name("0.json")
    while not first.exists() and time.monotonic() < end:
        time.sleep(0.05)
    os._exit(0 if first.exists() else 1)


def write_whole(output: Path, results: dict[str, dict[str, object]]) -> None:
    """Write results that nobody can read halfway."""
    part = output.with_suffix(".part")
    part.write_text(json.dumps(results))
    part.rename(output)


def main() -> None:
    """Run everything and write the results."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    num_devices, is_lost = torch.cuda.device_count(), sys.argv[5:] == ["lost"]
    torch.cuda.set_device(rank % num_devices)
    groups = init_process_groups(
        ParallelDims(dp=world, ep=world, rank=rank),
        f"127.0.0.1:{port}",
        backend="gloo" if is_lost or world > num_devices else "cpu:gloo,cuda:nccl",
    )
    output = Path(sys.argv[4])
    results: dict[str, dict[str, object]] = {}
    with torch.inference_mode():
        if is_lost:
            shape, _ = shapes(world)["small"]
            doomed = Rank(groups.ep_group, shape, [], wait_seconds=WAIT_SECONDS)
            results["lost"] = lose(doomed)
            write_whole(output, results)
            end_after_trap(output)
        for name, (shape, sizes) in shapes(world).items():
            results[name] = run(groups.ep_group, shape, sizes, records=name == "large")
            results[f"{name}, lopsided"] = run_lopsided(groups.ep_group, shape)
    write_whole(output, results)
    groups.destroy()


if __name__ == "__main__":
    main()
