"""One rank of a group whose steps have another number of drafts each time: run as a process.

Usage: python -m tests.engine.graphs.group_drafts_main RANK WORLD PORT CHECKPOINT OUTPUT DEVICE

The numbers are the same on all ranks, as a budget would choose them; some ranks have no requests.
Writes {mode: {"tokens": of each request, "counts": tokens that a step gave a request}} as JSON: of
drafts that are right most of the time, of the layer's, and without any. On a CPU over gloo, in
float32, with the checkpoint; on a GPU (which ranks may share) over NVLink's memory, with invented
weights, eager and by graphs.
"""

import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine.draft_choices import DraftChoices
from engine.graphs.graph_runner import GraphRunner
from engine.graphs.step_graphs import StepGraphs
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.graphs.drafting import SelfDrafting
from tests.engine.graphs.uneven_main import (
    COUNTS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    load,
    make_pool,
    make_requests,
)

CHOICES = DraftChoices.up_to(3, max_rows=4 * MAX_NUM_SEQS)
NUM_STEPS = 20


def draw_numbers() -> list[int]:
    """Drafts of each step, the same on all ranks: every one follows every other."""
    draw = Random(7)
    return [draw.randrange(CHOICES.most + 1) for _ in range(NUM_STEPS)]


def run_steps(
    model: DeepseekV3ForCausalLM,
    rank: int,
    counts: tuple[int, ...],
    numbers: list[int],
    *,
    use_graphs: bool,
    misses: int | None,
) -> dict[str, Any]:
    """Run one step for each of the numbers; what this rank's requests got.

    Without `misses` the layer drafts.
    """
    pool = make_pool(model, rank)
    graphs = StepGraphs(
        model if misses is None else SelfDrafting(model, misses),
        pool,
        vocab_size=model.config.vocab_size,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        use_graphs=use_graphs,
        num_drafts=CHOICES,
    )
    graphs.capture(group=model.groups.boot_group)
    steps = GraphRunner(ModelRunner(model, pool, Sampler(model.config.vocab_size)), graphs)
    requests = make_requests(rank, counts[rank], model.config.vocab_size)
    mean = -(-sum(counts) // len(counts))
    given = []
    for number in numbers:
        if not requests:
            steps.run_dummy(group_mean=mean, num_drafts=number)
            if pool.device.type == "cuda":
                torch.cuda.synchronize()
            continue
        scheduled = [ScheduledRequest(request, 1) for request in requests]
        results = steps.launch(scheduled, group_mean=mean, num_drafts=number).collect()
        given += [_take(request, result) for request, result in zip(requests, results, strict=True)]
    steps.close()
    return {"tokens": [request.output_token_ids for request in requests], "counts": given}


def _take(request: Request, result: StepResult) -> int:
    tokens = [token.token_id for token in result.tokens]
    assert tokens, f"the logits of {request.request_id} are not finite"
    request.num_computed_tokens += len(tokens)
    request.output_token_ids += tokens
    return len(tokens)


def main() -> None:
    """Run every mode and write what came of it."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    checkpoint, output, device = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    is_gpu = device == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    groups = init_process_groups(
        ParallelDims(dp=world, ep=world, rank=rank), f"127.0.0.1:{port}", timeout_s=240
    )
    results = {}
    most = 4 * MAX_NUM_SEQS
    with load(checkpoint, groups, device, is_fp8=is_gpu, max_tokens=most, with_mtp=True) as (
        model,
        counting,
    ):
        counting.is_counting = False
        for use_graphs in (False, True) if is_gpu else (False,):
            for name, numbers, misses in (
                ("mixed", draw_numbers(), 7),
                ("layer", draw_numbers(), None),
                ("none", [0] * NUM_STEPS, None),
            ):
                results[f"{name}, {use_graphs=}"] = run_steps(
                    model, rank, COUNTS[world], numbers, use_graphs=use_graphs, misses=misses
                )
    output.write_text(json.dumps(results))
    groups.ep_group.barrier()
    groups.destroy()


if __name__ == "__main__":
    main()
