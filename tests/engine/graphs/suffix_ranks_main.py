"""One rank of a group that shares heads and replays short steps of prefill: run as a process.

Usage: python -m tests.engine.graphs.suffix_ranks_main RANK WORLD PORT OUTPUT DEVICE KIND

Runs the same steps as a server would: called one kernel at a time and replayed; suffixes launched
as usual and dependently, the shared expert on the stream of all else and on its own. Writes {way:
sums that tell apart hidden states and pools with other bits} as JSON.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.batch import build_forward_batch
from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.boot.open_execution import open_execution
from engine.graphs.chunk_graphs import ChunkGraphs
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.portable import portable_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import ChunkSteps, EngineOptions, Switch
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.request import Request, ScheduledRequest
from engine.streams import Streams
from runtime.sampling import SamplingParams
from tests.engine.graphs.chunks import prompt_graphs, run_step, suffix_graphs
from tests.engine.graphs.uneven_main import NARROW

BLOCK_SIZE, MAX_SEQS, MAX_MODEL_LEN = 64, 4, 2048
WIDTH = MAX_MODEL_LEN // BLOCK_SIZE
STEPS = {
    "suffixes": (
        [(64, 2048)],
        [(1, 2000), (40, 1500), (23, 64)],
        [(3, 700)],
        [(250, 2048)],
        [(5, 5), (5, 2001), (5, 1000), (1, 1)],
    ),
    "prompts": (
        [(1024, 1024)],
        [(700, 700), (40, 40), (3, 3)],
        [(63, 63)],
        [(2000, 2000)],
        [(500, 1500), (400, 400), (300, 800)],
    ),
}
"""Queries and positions of each sequence, by what the steps are of."""
SIZES = {"suffixes": (16, 64, 256), "prompts": (64, 512, 1024, 2048)}
NUM_BLOCKS = 1 + max(sum(map(len, steps)) for steps in STEPS.values()) * WIDTH
NUM_ROUNDS = {"cpu": 1, "cuda": 8}
"""Of all steps: a kernel that begins too early need not do so each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How steps run.

    Attributes:
        dependent: launch each kernel while the one before it runs.
        beside: run the shared expert on a stream of its own.
        use_graphs: replay, or call.
    """

    dependent: bool = False
    beside: bool = False
    use_graphs: bool = False


WAYS = {
    "suffixes": [
        Way(),
        Way(use_graphs=True),
        Way(beside=True, use_graphs=True),
        Way(dependent=True, use_graphs=True),
        Way(dependent=True, beside=True),
        Way(dependent=True, beside=True, use_graphs=True),
    ],
    "prompts": [Way(), Way(use_graphs=True)],
}


def sum_bits(values: Tensor) -> int:
    """Return a number that tells tensors with other bits apart."""
    bits = values.contiguous().view(torch.uint8).flatten().to(torch.int64)
    places = torch.arange(1, len(bits) + 1, device=bits.device)
    return int((bits * (places % 65521)).sum())


def schedule(kind: str, step: int) -> list[ScheduledRequest]:
    """Return the sequences of a step, the same on all ranks.

    No step writes what another reads: every round finds what the first one found.
    """
    draw, lengths = random.Random(step), STEPS[kind][step]
    first = 1 + sum(map(len, STEPS[kind][:step])) * WIDTH
    blocks = draw.sample(range(first, first + len(lengths) * WIDTH), len(lengths) * WIDTH)
    return [
        ScheduledRequest(
            Request(
                request_id=str(index),
                prompt_token_ids=[draw.randrange(NARROW.vocab_size) for _ in range(positions)],
                sampling=SamplingParams(temperature=0.0),
                block_table=blocks[index * WIDTH : (index + 1) * WIDTH],
                num_computed_tokens=positions - queries,
            ),
            queries,
        )
        for index, (queries, positions) in enumerate(lengths)
    ]


def make_pool(model: DeepseekV3ForCausalLM) -> KVPool:
    """Return a pool of invented latents, the same on all ranks."""
    pool = build_kv_pool(model, NUM_BLOCKS, block_size=BLOCK_SIZE)
    generator = torch.Generator().manual_seed(1)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    return pool


def run(kind: str, way: Way, groups: ProcessGroups, device: torch.device) -> list[int]:
    """Return the sums of every step, and at last of the pool."""
    is_gpu, scatters = device.type == "cuda", groups.dims.world_size > 1
    options = EngineOptions(
        steps=ChunkSteps(
            scatter_tokens=scatters,
            overlap_shared_expert=way.beside,
            dependent_launches=Switch.ON if way.dependent else Switch.OFF,
        ),
        device=device.type,
    )
    kernels: Kernels = portable_kernels(has_fp8=True, has_paged_attention=True)
    if is_gpu:
        kernels = create_kernels(device)
    streams = Streams(device)
    opened = open_execution(
        options,
        NARROW,
        groups,
        kernels=kernels,
        num_physical_experts=NARROW.n_routed_experts,
        streams=streams,
    )
    assert opened.execution.max_masked_tokens > 0, "experts take masked rows, as in a server"
    torch.manual_seed(0)
    model = build_model(
        NARROW,
        groups,
        dtype=torch.bfloat16,
        device=device,
        load_format=LoadFormat.DUMMY,
        kernels=kernels,
        execution=opened.execution,
    )
    assert isinstance(model, DeepseekV3ForCausalLM)
    cost = 0.0 if kind == "suffixes" else float("inf")
    model.attention.rule = replace(model.attention.rule, absorbed_cost=cost)
    model.prepare()
    pool = make_pool(model)
    how: dict[str, Any] = {"use_graphs": way.use_graphs and is_gpu, "streams": streams}
    graphs = (
        prompt_graphs(model, pool, SIZES[kind], max_num_seqs=MAX_SEQS, max_num_cached=1500, **how)
        if kind == "prompts"
        else suffix_graphs(
            model,
            pool,
            SIZES[kind],
            max_num_seqs=MAX_SEQS,
            max_model_len=MAX_MODEL_LEN,
            **how,
        )
    )
    graphs.capture(group=groups.boot_group)
    pool.data.copy_(make_pool(model).data)
    sums = _run_steps(kind, graphs, pool, device)
    graphs.close()
    opened.close()
    streams.close()
    return sums


def _run_steps(kind: str, graphs: ChunkGraphs, pool: KVPool, device: torch.device) -> list[int]:
    """Run all steps several times, without waiting in between, and look at every one."""
    sums = []
    for _ in range(NUM_ROUNDS[device.type]):
        hidden = []
        for step in range(len(STEPS[kind])):
            with torch.inference_mode():
                batch = build_forward_batch(schedule(kind, step), BLOCK_SIZE, device)
            hidden.append(run_step(graphs, batch).clone())
        sums += [sum_bits(rows) for rows in hidden]
    return [*sums, sum_bits(pool.data[1:])]  # block 0 is for padding, which writes in a race


def main() -> None:
    """Run every way and write what came of it."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    output, device_type, kind = Path(sys.argv[4]), sys.argv[5], sys.argv[6]
    torch.set_num_threads(1)
    is_gpu = device_type == "cuda"
    device = torch.device(device_type, rank) if is_gpu else torch.device(device_type)
    if is_gpu:
        torch.cuda.set_device(device)
    groups = init_process_groups(
        ParallelDims(tp=world, ep=world, rank=rank),
        f"127.0.0.1:{port}",
        backend="cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        timeout_s=240,
    )
    results = [{**asdict(way), "sums": run(kind, way, groups, device)} for way in WAYS[kind]]
    output.write_text(json.dumps(results))
    groups.boot_group.barrier()
    groups.destroy()


if __name__ == "__main__":
    main()
