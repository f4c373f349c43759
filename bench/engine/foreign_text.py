"""What the bundled model is worth on foreign text, and what an FP8 KV pool costs it.

Its held-out text is of the library that it learned from. Here are the Python files of any other
folders: loss, drafts that its MTP layer gets right, on given text and on text of its own, how
unevenly 64 tokens choose experts beside a choice by chance, and how a pool in bfloat16 or e4m3
changes its log-probabilities. With the engine as it serves, on a CPU in float32.

    python -m bench.engine.foreign_text FOLDER... [--rows 4]

A row is the beginning of one of a folder's largest files. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deploy.model_folder import BUNDLED_MODEL
from engine.batch import pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.generate import GenerateOutput, generate
from engine.layers.moe import Gate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.sampling import SamplingParams

ROW_LENGTH = 1024
PROMPT_LENGTH = 256
NUM_OWN_TOKENS = 128
BLOCK_SIZE = 64
WINDOW = 64
"""Tokens of a decode step."""
POOLS = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_SCORE = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=1)


def rows_of(
    folder: Path, num_rows: int, tokenizer: Tokenizer, length: int = ROW_LENGTH
) -> Iterator[list[int]]:
    """Yield the first `length` tokens of the largest files, those that have as many."""
    files = sorted(folder.rglob("*.py"), key=lambda file: (-file.stat().st_size, file.as_posix()))
    rows = (tokenizer.encode(file.read_text(encoding="utf-8")).ids for file in files)
    full = (row[:length] for row in rows if len(row) >= length)
    yield from (row for row, _ in zip(full, range(num_rows), strict=False))


def score(
    model: DeepseekV3ForCausalLM, rows: Sequence[list[int]], kv_dtype: torch.dtype
) -> tuple[list[float], list[int]]:
    """Return the log-probability of each token but the first of a row, and the likeliest there."""
    outputs: list[GenerateOutput] = generate(model, rows, _SCORE, kv_dtype=kv_dtype)
    entries = [entry for output in outputs for entry in output.prompt_logprobs]
    return [entry.logprob for entry in entries], [entry.top_ids[0] for entry in entries]


@torch.inference_mode()
def accepted_drafts(model: DeepseekV3ForCausalLM, row: list[int], first: int) -> list[bool]:
    """Return for each draft of a token from `first` on whether the model itself chooses it."""
    length, num_blocks = len(row) - 1, 1 + len(row) // BLOCK_SIZE
    pool = build_kv_pool(model, num_blocks + 1, block_size=BLOCK_SIZE)
    batch = pack_forward_batch(
        np.array(row[:-1]),
        np.array([length]),
        np.array([length]),
        np.arange(1, num_blocks + 1, dtype=np.int32)[None],
        logits_indices=np.zeros(0, dtype=np.int64),
        block_size=BLOCK_SIZE,
    )
    hidden = model(batch, pool)
    drafted = model.forward_mtp(hidden, torch.tensor(row[1:]), batch, pool)
    # Row t drafts token t + 2 knowing t + 1; the model chooses it in row t + 1.
    chosen = model.compute_logits(hidden[1:]).argmax(-1)
    guessed = model.compute_logits(drafted[:-1]).argmax(-1)
    accepted: list[bool] = (chosen == guessed)[max(first - 2, 0) :].tolist()
    return accepted


def own_rows(model: DeepseekV3ForCausalLM, rows: Sequence[list[int]]) -> list[list[int]]:
    """Return beginnings of rows with what the model goes on with, greedily."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_OWN_TOKENS)
    prompts = [row[:PROMPT_LENGTH] for row in rows]
    outputs = generate(model, prompts, greedy)
    return [prompt + out.token_ids for prompt, out in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def expert_skew(model: DeepseekV3ForCausalLM, rows: Sequence[list[int]]) -> list[float]:
    """Return for each MoE layer the largest load of an expert over the mean.

    Among 64 tokens from anywhere in the rows, as a decode step has them of as many requests.
    """
    chosen: dict[str, list[Tensor]] = {}

    def note(name: str, topk_ids_TK: Tensor) -> None:
        chosen.setdefault(name, []).append(topk_ids_TK)

    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: note(name, out[0]))
        for name, module in model.named_modules()
        if isinstance(module, Gate)
    ]
    score(model, rows, torch.float32)
    for hook in hooks:
        hook.remove()
    skews = []
    for parts in chosen.values():
        ids = torch.cat(parts)
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
        skews.append([_skew_of(window, model.config) for window in torch.split(ids[order], WINDOW)])
    return [float(np.mean(layer)) for layer in skews]


def chance_skew(config: DeepseekV3Config, repeats: int = 2000) -> float:
    """Return the same where each token draws its experts from all, each with the same chance."""
    draw = torch.Generator().manual_seed(0)
    order = torch.rand(repeats, WINDOW, config.n_routed_experts, generator=draw).argsort(-1)
    return float(np.mean([_skew_of(ids[:, : config.num_experts_per_tok], config) for ids in order]))


def _skew_of(topk_ids_TK: Tensor, config: DeepseekV3Config) -> float:
    loads = topk_ids_TK.flatten().bincount(minlength=config.n_routed_experts)
    return float(loads.max() / loads.float().mean())


def measure(
    model: DeepseekV3ForCausalLM, rows: Sequence[list[int]], tokenizer: Tokenizer
) -> dict[str, float | list[float]]:
    """Return all figures of some rows, by name."""
    logprobs, best = score(model, rows, torch.float32)
    num_bytes = sum(len(tokenizer.decode(row[1:]).encode()) for row in rows)
    given = [ok for row in rows for ok in accepted_drafts(model, row, 2)]
    own = [ok for row in own_rows(model, rows) for ok in accepted_drafts(model, row, PROMPT_LENGTH)]
    figures: dict[str, float | list[float]] = {
        "num_tokens": len(logprobs),
        "loss": -float(np.mean(logprobs)),
        "bits_per_byte": -sum(logprobs) / math.log(2) / num_bytes,
        "mtp_acceptance_given": float(np.mean(given)),
        "mtp_acceptance_own": float(np.mean(own)),
        "expert_skew": expert_skew(model, rows),
        "expert_skew_by_chance": chance_skew(model.config),
    }
    for name, dtype in POOLS.items():
        others, best_of_others = score(model, rows, dtype)
        figures[f"{name}_same_best"] = float(np.mean(np.equal(best, best_of_others)))
        figures[f"{name}_logprob_difference"] = float(
            np.mean(np.abs(np.subtract(logprobs, others)))
        )
        figures[f"{name}_loss"] = -float(np.mean(others))
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the bundled model on foreign text.")
    parser.add_argument("folders", type=Path, nargs="+", help="with Python files")
    parser.add_argument("--rows", type=int, default=4, help="of each folder")
    parser.add_argument("--row-length", type=int, default=ROW_LENGTH, help="tokens of a row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    model = build_model(BUNDLED_MODEL, with_mtp=True)
    assert isinstance(model, DeepseekV3ForCausalLM)
    wanted = arguments.rows, tokenizer, arguments.row_length
    rows = [row for folder in arguments.folders for row in rows_of(folder, *wanted)]
    folders = [folder.name for folder in arguments.folders]
    print(
        json.dumps({"folders": folders, "num_rows": len(rows), **measure(model, rows, tokenizer)})
    )


if __name__ == "__main__":
    main()
