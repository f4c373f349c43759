"""One rank of a real instance over gloo: run by `test_ranks` as a process of its own.

Usage: python -m tests.engine.parallel.rank_main RANK WORLD PORT CHECKPOINTS OUTPUT

Runs the modes that WORLD ranks allow, one after another, and writes {mode: result} as JSON. The
last mode kills a rank, to see that the others notice.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.boot.build import build_kv_pool, build_model
from engine.execution import Execution
from engine.formats.expert_rows import ExpertRows
from engine.generate import generate
from engine.micro_batches import OverlapRule
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.parallel.row_formats import ExpertShare, PlainRows
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.errors import PeerLostError
from runtime.sampling import SamplingParams
from tests.engine.parallel.layouts import Trial

NUM_STEPS = 12
PROMPTS = [[(5 * i * i + 3 * i + s) % 128 for i in range(n)] for s, n in enumerate((19, 40, 3, 70))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS)


def same_tokens_on_all(
    checkpoint: Path, groups: ProcessGroups, execution: Execution | None = None
) -> list[list[int]]:
    """Tensor parallel: every rank runs every prompt, in step."""
    model = build_model(checkpoint, groups, execution=execution)
    return [output.token_ids for output in generate(model, PROMPTS, GREEDY)]


def own_tokens(
    checkpoint: Path, groups: ProcessGroups, execution: Execution | None = None
) -> list[list[int]]:
    """Data parallel: rank r serves prompts r, r + n, ..., one starting every third step.

    Ranks have unlike numbers of tokens in a step, and the last ones idle: rank 3 of 4 has one
    prompt, and with two ranks both have two. With overlap, so are their micro-batches, some empty.
    """
    model = build_model(checkpoint, groups, execution=execution)
    kv_pool = build_kv_pool(model, 64, block_size=8)
    runner = ModelRunner(model, kv_pool, Sampler(model.config.vocab_size))
    mine = PROMPTS[groups.rank :: groups.dims.dp]
    requests = [
        Request(request_id=str(i), prompt_token_ids=list(prompt), sampling=GREEDY)
        for i, prompt in enumerate(mine)
    ]
    for i, request in enumerate(requests):
        request.block_table = list(range(1 + 16 * i, 17 + 16 * i))
    for step in range(3 * len(PROMPTS) + NUM_STEPS):
        scheduled = [
            ScheduledRequest(request, request.num_tokens - request.num_computed_tokens)
            for i, request in enumerate(requests)
            if step >= 3 * i + groups.rank and len(request.output_token_ids) < NUM_STEPS
        ]
        if not scheduled:
            with torch.inference_mode():
                model(ForwardBatch.dummy(), kv_pool)
            continue
        for result in runner.execute(scheduled):
            assert result.sampled is not None
            result.request.num_computed_tokens = result.request.num_tokens
            result.request.output_token_ids.append(result.sampled.token_id)
    return [request.output_token_ids for request in requests]


def all_to_all(groups: ProcessGroups) -> float:
    """Uneven and empty batches through the dispatcher; expert e multiplies by e + 1."""
    group, num_local, worst = groups.ep_group, 3, 0.0
    share = ExpertShare(first=num_local * group.rank, num_local=num_local, num_ranks=group.size)
    dispatcher = AllToAllDispatcher(PlainRows(share), group)
    for attempt, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16, torch.float32)):
        num_tokens = (group.rank * 7 + attempt * 5) % 11 if attempt < 3 else 0
        generator = torch.Generator().manual_seed(group.rank * 100 + attempt)
        hidden = torch.randn(num_tokens, 6, generator=generator).to(dtype)
        scores = torch.rand(num_tokens, num_local * group.size, generator=generator)
        weights, ids = scores.topk(2, dim=-1)
        rows, handle = dispatcher.start_dispatch(hidden, ids, weights).wait()
        assert isinstance(rows, ExpertRows)
        counts = torch.tensor(rows.num_rows_per_expert)
        first = group.rank * num_local + 1
        factors = torch.arange(first, first + num_local).repeat_interleave(counts)
        out = dispatcher.start_combine(rows.rows_MD * factors.unsqueeze(1), handle, None).wait()
        expected = hidden.float() * ((ids + 1) * weights).sum(-1, keepdim=True)
        error = (out.float() - expected).abs() / expected.abs().clamp_min(1.0)
        limit = 1e-5 if dtype == torch.float32 else 0.02
        worst = max(worst, float(error.max()) / limit if num_tokens else 0.0)
    return worst


def in_fp8(trial: Trial) -> dict[str, float]:
    """Layouts of the whole model, and the experts alone."""
    return {**trial.compare_layouts(), "experts": trial.compare_experts()}


def lose_a_rank(groups: ProcessGroups) -> str:
    """The last rank dies; the others must get an error in seconds instead of hanging."""
    if groups.rank == groups.dims.world_size - 1:
        return "died"
    start = time.monotonic()
    try:
        while time.monotonic() < start + 100:
            groups.tp_group.all_reduce(torch.ones(4))
    except PeerLostError:
        return "noticed"
    return "never noticed"


def main() -> None:
    """Run the modes and write the results."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    checkpoints, output = Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    plain, direct, fp8 = (checkpoints / name for name in ("plain", "direct", "fp8"))
    tp_ep, dp_ep = {"tp": world, "ep": world}, {"dp": world, "ep": world}
    overlapped = Execution(overlap=OverlapRule(min_tokens=2, lag=1))
    modes: dict[str, tuple[dict[str, int], Callable[[ProcessGroups], Any]]] = {
        "tp": ({"tp": world}, lambda groups: same_tokens_on_all(plain, groups)),
        "tp+ep": (tp_ep, lambda groups: same_tokens_on_all(plain, groups, overlapped)),
        "dp+ep": (
            dp_ep,
            lambda groups: [own_tokens(plain, groups), own_tokens(plain, groups, overlapped)],
        ),
        "layouts": (
            tp_ep,
            lambda groups: [
                Trial(checkpoint=checkpoint, groups=groups).compare_layouts()
                for checkpoint in (plain, direct)
            ],
        ),
        "fp8": (tp_ep, lambda groups: in_fp8(Trial(checkpoint=fp8, groups=groups, fp8=True))),
        "tp layouts": (
            {"tp": world},
            lambda groups: [Trial(checkpoint=plain, groups=groups).compare_layouts()],
        ),
        "dp layouts": (
            dp_ep,
            lambda groups: [Trial(checkpoint=plain, groups=groups).compare_layouts()],
        ),
        "dp fp8": (dp_ep, lambda groups: in_fp8(Trial(checkpoint=fp8, groups=groups, fp8=True))),
        "all_to_all": (dp_ep, all_to_all),
        "lost": ({"tp": world}, lose_a_rank),
    }
    results = {}
    for number, (mode, (axes, body)) in enumerate(modes.items()):
        dims = ParallelDims(**axes, rank=rank)
        groups = init_process_groups(dims, f"127.0.0.1:{port + number}", timeout_s=120)
        results[mode] = body(groups)
        output.write_text(json.dumps(results))
        if mode != "lost":
            groups.tp_group.barrier()
            groups.ep_group.barrier()
            groups.destroy()


if __name__ == "__main__":
    main()
