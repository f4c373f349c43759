"""One rank of a group in which one has many requests and others few or none: run as a process.

Usage: python -m tests.engine.graphs.uneven_main RANK WORLD PORT CHECKPOINT OUTPUT DEVICE

Runs decode steps of fixed shapes in every mode and writes {mode: outcome} as JSON. On a CPU over
gloo, with the checkpoint; on a GPU (which ranks may share) over NVLink's memory, with invented
weights, eager and by graphs.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.shapes import DEEPSEEK_V3
from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.graphs.graph_runner import GraphRunner
from engine.graphs.step_graphs import StepGraphs
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.portable import portable_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import DispatcherKind
from engine.parallel.choose_dispatcher import RankExperts, choose_dispatcher
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.parallel.counting_dispatcher import CountingDispatcher

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_STEPS = 16, 128, 64, 6
NARROW = replace(
    DEEPSEEK_V3,
    vocab_size=4096,
    hidden_size=1024,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=64,
    q_lora_rank=512,
    intermediate_size=2048,
    moe_intermediate_size=512,
    n_routed_experts=16,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=4,
)
"""On a GPU: what its kernels take, with invented weights."""
COUNTS = {2: (11, 0), 4: (1, 11, 0, 0)}
"""Requests of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank saw.

    Attributes:
        tokens: of each request.
        rows: in each step, rows that came to this rank's experts, over all layers.
        kv: sums that tell apart pools with other bits, of each request's blocks.
    """

    tokens: list[list[int]]
    rows: list[int]
    kv: list[int] = field(default_factory=list)


def make_requests(rank: int, count: int, vocab_size: int) -> list[Request]:
    """Requests in the middle of their output, with blocks of their own."""
    requests = []
    for index in range(count):
        prompt = [(7 * i * i + 5 * index + 31 * rank) % vocab_size for i in range(3 + 2 * index)]
        request = Request(
            request_id=f"{rank}/{index}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0),
            num_computed_tokens=len(prompt) - 1,
        )
        width = MAX_MODEL_LEN // BLOCK_SIZE
        request.block_table = list(range(1 + width * index, 1 + width * (index + 1)))
        requests.append(request)
    return requests


def make_pool(model: DeepseekV3ForCausalLM, rank: int) -> KVPool:
    """A pool of invented latents."""
    pool = build_kv_pool(
        model, 1 + MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE, block_size=BLOCK_SIZE
    )
    generator = torch.Generator().manual_seed(rank)
    pool.data.copy_(torch.randn(pool.data.shape, generator=generator))
    return pool


def run_plainly(model: DeepseekV3ForCausalLM, rank: int, count: int) -> list[list[int]]:
    """The tokens of a rank's requests where nobody else is there, and nothing is padded."""
    runner = ModelRunner(model, make_pool(model, rank), Sampler(model.config.vocab_size))
    requests = make_requests(rank, count, model.config.vocab_size)
    for _ in range(NUM_STEPS if requests else 0):
        results = runner.execute([ScheduledRequest(request, 1) for request in requests])
        _book([result.sampled and result.sampled.token_id for result in results], requests)
    return [request.output_token_ids for request in requests]


def run_fixed(
    model: DeepseekV3ForCausalLM,
    counting: CountingDispatcher,
    rank: int,
    counts: tuple[int, ...],
    *,
    use_graphs: bool = False,
) -> Outcome:
    """The same with fixed shapes, in a group."""
    pool = make_pool(model, rank)
    graphs = StepGraphs(
        model,
        pool,
        vocab_size=model.config.vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        use_graphs=use_graphs,
    )
    counting.is_counting = not use_graphs
    graphs.capture(group=model.groups.boot_group)
    steps = GraphRunner(ModelRunner(model, pool, Sampler(model.config.vocab_size)), graphs)
    requests = make_requests(rank, counts[rank], model.config.vocab_size)
    mean = -(-sum(counts) // len(counts))
    rows = []
    for _ in range(NUM_STEPS):
        counting.num_rows = 0
        if not requests:
            steps.run_dummy(group_mean=mean)
            if pool.device.type == "cuda":
                torch.cuda.synchronize()
        else:
            scheduled = [ScheduledRequest(request, 1) for request in requests]
            results = steps.launch(scheduled, group_mean=mean).collect()
            _book([result.sampled and result.sampled.token_id for result in results], requests)
        rows.append(counting.num_rows)
    steps.close()
    bits = pool.data.view(torch.uint8).flatten(1).to(torch.int64)
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    sums = (bits * places).sum(1).tolist()
    return Outcome(
        tokens=[request.output_token_ids for request in requests],
        rows=rows,
        kv=[sums[block] for request in requests for block in request.block_table],
    )


def _book(tokens: list[Any], requests: list[Request]) -> None:
    for token, request in zip(tokens, requests, strict=True):
        assert token is not None, f"the logits of {request.request_id} are not finite"
        request.num_computed_tokens += 1
        request.output_token_ids.append(token)


@contextmanager
def load(
    checkpoint: Path,
    groups: ProcessGroups,
    device: str,
    *,
    is_fp8: bool,
    max_tokens: int = MAX_NUM_SEQS,
    with_mtp: bool = False,
) -> Iterator[tuple[DeepseekV3ForCausalLM, CountingDispatcher]]:
    """Yield the model with a dispatcher of fixed shapes, or, if not in FP8, of the axes."""
    dtype = torch.bfloat16 if is_fp8 else torch.float32
    kernels: Kernels = portable_kernels(has_fp8=is_fp8)
    source: Path | DeepseekV3Config = checkpoint
    if device == "cuda":
        kernels, source = create_kernels("cuda", dtype), NARROW
    if is_fp8:
        config = (
            source if isinstance(source, DeepseekV3Config) else DeepseekV3Config.from_dir(source)
        )
        experts = RankExperts(
            config=config, groups=groups, kernels=kernels, device=torch.device(device)
        )
        kind = DispatcherKind.NVLINK if device == "cuda" else DispatcherKind.GATHERED
        opened = choose_dispatcher(experts, kind, max_tokens_per_rank=max_tokens)
        inner, close = opened.dispatcher, opened.close
    else:
        plain = build_model(checkpoint, groups, dtype=dtype)
        inner, close = plain.model.layers[-1].mlp.dispatcher, lambda: None
    counting = CountingDispatcher(inner)
    model = build_model(
        source,
        groups,
        dtype=dtype,
        device=device,
        load_format=LoadFormat.SAFETENSORS if source is checkpoint else LoadFormat.DUMMY,
        with_mtp=with_mtp,
        kernels=kernels,
        execution=Execution(dispatcher=counting),
    )
    model.prepare()
    yield model, counting
    close()


def main() -> None:
    """Run every mode and write the outcomes."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    checkpoint, output, device = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    groups = init_process_groups(
        ParallelDims(dp=world, ep=world, rank=rank), f"127.0.0.1:{port}", timeout_s=240
    )
    results = {}
    for is_fp8 in (True,) if device == "cuda" else (False, True):
        folder = checkpoint / ("fp8" if is_fp8 else "plain")
        with load(folder, groups, device, is_fp8=is_fp8) as (model, counting):
            for use_graphs in (False, True) if device == "cuda" else (False,):
                outcome = run_fixed(model, counting, rank, COUNTS[world], use_graphs=use_graphs)
                results[f"{is_fp8=}, {use_graphs=}"] = asdict(outcome)
    output.write_text(json.dumps(results))
    groups.ep_group.barrier()
    groups.destroy()


if __name__ == "__main__":
    main()
