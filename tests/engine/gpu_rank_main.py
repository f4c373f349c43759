"""One rank of the bundled model on a GPU: run by `test_gpu_ranks` as a process of its own.

Usage: python -m tests.engine.gpu_rank_main RANK WORLD PORT PROMPTS OUTPUT [cpu]

The modes take a port each, from PORT on; PROMPTS is a JSON file of token ids. Runs
the modes one after another and writes {mode: {prompt's index: answer}} as JSON, and lines for
people on stdout. On a CPU it is float32.
"""

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine.boot.build import build_kv_pool, build_model
from engine.boot.jit_cache import use_jit_cache
from engine.boot.warm_up import products, warm_up
from engine.execution import Execution
from engine.generate import GenerateOutput, generate
from engine.kernels.create import create_kernels
from engine.micro_batches import OverlapRule
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from tests.engine.agreement import BUNDLED, SAMPLING, Answer

Prompts = list[list[int]]
Outputs = dict[int, GenerateOutput]
BLOCK_SIZE = 64

OVERLAP = OverlapRule(min_tokens=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run the model on several ranks.

    Attributes:
        axes: of these, each is as long as there are ranks.
        execution: see `Execution`.
    """

    axes: tuple[str, ...]
    execution: Execution = field(default_factory=Execution)


def modes_of(world: int) -> dict[str, Mode]:
    """Return what so many ranks run."""
    alone = {
        "tp": Mode(axes=("tp",)),
        "tp, overlapped": Mode(axes=("tp",), execution=Execution(overlap=OVERLAP)),
    }
    if world == 1:
        return alone
    scattered = Execution(scatter_tokens=True, overlap=OVERLAP)
    return {
        **alone,
        "tp+ep": Mode(axes=("tp", "ep"), execution=Execution(scatter_tokens=False)),
        "tp+ep, scattered": Mode(axes=("tp", "ep"), execution=Execution(scatter_tokens=True)),
        "tp+ep, scattered, overlapped": Mode(axes=("tp", "ep"), execution=scattered),
        "dp+ep": Mode(axes=("dp", "ep")),
        "dp+ep, overlapped": Mode(axes=("dp", "ep"), execution=Execution(overlap=OVERLAP)),
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


def run_mode(mode: Mode, groups: ProcessGroups, device: torch.device, prompts: Prompts) -> Outputs:
    """Build the model in the mode's way and run what this rank runs of the prompts."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = build_model(
        BUNDLED,
        groups,
        dtype=dtype,
        device=device,
        kernels=create_kernels(device, dtype),
        execution=mode.execution,
    )
    if device.type == "cuda":
        rows = [2**n for n in range(12)]
        todo = products(model, max(map(len, prompts)), rows=rows)
        warm_up(todo, groups, synchronize=torch.cuda.synchronize)
    return (run_together if groups.dims.tp > 1 else run_own)(model, prompts)


def main() -> None:
    """Run every mode and write the results."""
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    first_port = int(sys.argv[3])
    prompts: Prompts = json.loads(Path(sys.argv[4]).read_text())
    device = torch.device("cpu")
    backend = "gloo"
    if sys.argv[6:] != ["cpu"]:
        num_devices = torch.cuda.device_count()
        if num_devices < world:  # a rank may share the one device that it sees
            os.environ["CUDA_VISIBLE_DEVICES"] = str(rank % num_devices)
        device = torch.device("cuda", rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
        use_jit_cache()
    results: dict[str, dict[int, object]] = {}
    for port, (name, mode) in enumerate(modes_of(world).items(), first_port):
        dims = ParallelDims(**dict.fromkeys(mode.axes, world), rank=rank)
        groups = init_process_groups(dims, f"127.0.0.1:{port}", backend=backend)
        start = time.monotonic()
        outputs = run_mode(mode, groups, device, prompts)
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        results[name] = {
            index: dataclasses.asdict(Answer.of(output)) for index, output in outputs.items()
        }
        groups.tp_group.barrier()
        groups.ep_group.barrier()
        groups.destroy()
    Path(sys.argv[5]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
