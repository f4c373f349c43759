"""One rank of the bundled model on its own GPU: run by `test_gpu_ranks` as a process of its own.

Usage: python -m tests.engine.gpu_rank_main RANK WORLD PORTS PROMPTS OUTPUT [cpu]

PORTS is a comma list, one for each mode; PROMPTS is a JSON file of token ids. Runs the modes one
after another and writes {mode: {prompt's index: answer}} as JSON, and lines for people on stdout.
On a CPU it is float32.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.build import build_kv_pool, build_model
from engine.generate import GenerateOutput, generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.agreement import BUNDLED, SAMPLING, Answer

Prompts = list[list[int]]
Outputs = dict[int, GenerateOutput]
BLOCK_SIZE = 64

MODES: dict[str, Callable[[int], dict[str, int]]] = {
    "tp": lambda world: {"tp": world},
    "tp+ep": lambda world: {"tp": world, "ep": world},
    "dp+ep": lambda world: {"dp": world, "ep": world},
}


def run_together(model: DeepseekV3ForCausalLM, prompts: Prompts) -> Outputs:
    """Tensor parallel: every rank runs every prompt, in step."""
    outputs = generate(model, prompts, SAMPLING, kv_dtype=model.dtype, device=model.device)
    return dict(enumerate(outputs))


def run_own(model: DeepseekV3ForCausalLM, prompts: Prompts) -> Outputs:
    """Data parallel: rank r serves prompts r, r + n, ...; all ranks step equally often."""
    dims = model.groups.dims
    outputs: Outputs = {}
    num_rounds = -(-len(prompts) // dims.dp)
    most_blocks = max(num_blocks_for(len(p) + SAMPLING.max_tokens, BLOCK_SIZE) for p in prompts)
    kv_pool = build_kv_pool(model, most_blocks + 1, block_size=BLOCK_SIZE)
    runner = ModelRunner(model, kv_pool, Sampler(model.config.vocab_size))
    for turn in range(num_rounds):
        index = turn * dims.dp + dims.rank
        request = None
        if index < len(prompts):
            request = Request(
                request_id=str(index), prompt_token_ids=prompts[index], sampling=SAMPLING
            )
            request.block_table = list(range(1, most_blocks + 1))
            outputs[index] = GenerateOutput()
        for _ in range(SAMPLING.max_tokens):
            step(runner, request, outputs.get(index))
    return outputs


def step(runner: ModelRunner, request: Request | None, output: GenerateOutput | None) -> None:
    """Run one step of a request, or join the others' step with nothing to do."""
    if request is None or output is None:
        runner.run_dummy()
        return
    missing = request.num_tokens - request.num_computed_tokens
    result = runner.execute([ScheduledRequest(request, missing)])[0]
    assert result.sampled is not None
    request.num_computed_tokens = request.num_tokens
    request.output_token_ids.append(result.sampled.token_id)
    output.token_ids.append(result.sampled.token_id)
    output.prompt_logprobs += result.prompt_logprobs


def main() -> None:
    """Run every mode and write the results."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    ports = sys.argv[3].split(",")
    prompts: Prompts = json.loads(Path(sys.argv[4]).read_text())
    device, dtype, backend = torch.device("cpu"), torch.float32, "gloo"
    if sys.argv[6:] != ["cpu"]:
        device, dtype, backend = torch.device("cuda", rank), torch.bfloat16, "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    results: dict[str, dict[int, object]] = {}
    for (mode, axes), port in zip(MODES.items(), ports, strict=True):
        groups = init_process_groups(
            ParallelDims(**axes(world), rank=rank),
            f"127.0.0.1:{port}",
            backend=backend,
        )
        start = time.monotonic()
        model = build_model(BUNDLED, groups, dtype=dtype, device=device)
        run = run_together if groups.dims.tp > 1 else run_own
        outputs = run(model, prompts)
        print(f"{mode}: kernels {model.kernels.name}, {time.monotonic() - start:.1f} s", flush=True)
        results[mode] = {
            index: dataclasses.asdict(Answer.of(output)) for index, output in outputs.items()
        }
        groups.tp_group.barrier()
        groups.ep_group.barrier()
        groups.destroy()
    Path(sys.argv[5]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
