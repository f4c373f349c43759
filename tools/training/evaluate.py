"""What the bundled model is worth: held-out loss, MTP acceptance, expert load, samples.

Measures the stored checkpoint, thus after FP8, with the training model and dequantised weights.
Not a speed benchmark.

    python -m tools.training.evaluate .train/tokens.safetensors
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.training.architecture import BOS_ID, CONTEXT
from tools.training.checkpoint import load_checkpoint
from tools.training.conversation import Exchange
from tools.training.dataset import CHECKPOINT, cut_rows, load_corpus
from tools.training.model import TrainedModel
from tools.training.tokenizer import EOS, render

PROMPTS: Final = ("def fibonacci(n):", "class Stack:", "import os\n\n\ndef read_lines(path):")
QUESTIONS: Final = (
    "Write a Python function `add(a, b)`. Return the sum of a and b.",
    "Return the number of lines in a file.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Measurements over a text.

    Attributes:
        num_tokens: tokens that were predicted.
        loss: nats per token of the main model.
        bits_per_byte: the same per byte of text.
        mtp_loss: nats per token of the MTP layer, which predicts one token further.
        mtp_acceptance: share of positions where the MTP layer's most likely token is also that of
            the main model one position later, which is when a greedy draft is accepted.
        expert_share: per MoE layer (MTP last), each expert's share of the routed tokens.
        load_skew: per MoE layer, the largest share over the mean share.
        row_load_skew: the same within one row of context, mean over rows.
    """

    num_tokens: int
    loss: float
    bits_per_byte: float
    mtp_loss: float
    mtp_acceptance: float
    expert_share: list[list[float]]
    load_skew: list[float]
    row_load_skew: list[float]


@torch.no_grad()
def measure(
    model: TrainedModel, tokens: Tensor, token_bytes: Tensor, *, row_length: int = CONTEXT
) -> Quality:
    """Measure a model on a text.

    Args:
        model: on any device, in any dtype.
        tokens: [num_tokens] int64 on the CPU.
        token_bytes: [vocab_size] int64, bytes of text per token.
        row_length: context; every row starts afresh.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    rows = cut_rows(tokens, min(row_length, len(tokens)))
    totals = torch.zeros(3, dtype=torch.float64)
    loads = []
    for row in rows:
        _take_load(model)
        totals += _row_totals(model, row[None].to(device))
        loads.append(_take_load(model))
    model.train(was_training)
    row_load = torch.stack(loads)  # [num_rows, num_layers, num_experts]
    load = row_load.sum(0)
    num_tokens = rows.shape[0] * (rows.shape[1] - 1)
    num_drafts = rows.shape[0] * (rows.shape[1] - 2)
    num_bytes = int(token_bytes[rows[:, 1:]].sum())
    return Quality(
        num_tokens=num_tokens,
        loss=float(totals[0]) / num_tokens,
        bits_per_byte=float(totals[0]) / math.log(2) / num_bytes,
        mtp_loss=float(totals[1]) / num_drafts,
        mtp_acceptance=float(totals[2]) / num_drafts,
        expert_share=(load / load.sum(-1, keepdim=True)).tolist(),
        load_skew=_skew(load).tolist(),
        row_load_skew=_skew(row_load).mean(0).tolist(),
    )


def _take_load(model: TrainedModel) -> Tensor:
    """Return [num_layers, num_experts] tokens routed since the last call, and start over."""
    load = torch.stack([experts.load for experts in model.expert_layers()]).cpu()
    for experts in model.expert_layers():
        experts.load.zero_()
    return load


def _skew(load: Tensor) -> Tensor:
    """Largest over mean in the last dimension."""
    return load.amax(-1) / load.mean(-1)


def _row_totals(model: TrainedModel, ids: Tensor) -> Tensor:
    """Return summed loss, summed MTP loss and accepted drafts for ids [1, S]."""
    main, drafted = model(ids)
    loss = functional.cross_entropy(main[0, :-1].float(), ids[0, 1:], reduction="sum")
    mtp_loss = functional.cross_entropy(drafted[0, :-1].float(), ids[0, 2:], reduction="sum")
    accepted = (drafted[0, :-1].argmax(-1) == main[0, 1:-1].argmax(-1)).sum()
    return torch.tensor([loss.item(), mtp_loss.item(), accepted.item()], dtype=torch.float64)


def greedy(model: TrainedModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Return up to that many most likely tokens after a prompt, ending early at EOS."""
    ids = torch.tensor([prompt_ids], device=next(model.parameters()).device)
    mask = torch.ones_like(ids)
    generate = cast(Any, model.main).generate  # the library types it on a protocol
    output = generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    return cast(list[int], output[0, len(prompt_ids) :].tolist())


def samples(model: TrainedModel, tokenizer: Tokenizer, num_tokens: int) -> dict[str, str]:
    """Return greedy continuations by prompt, and answers by question."""
    texts: dict[str, str] = {}
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        assert ids[0] == BOS_ID
        texts[prompt] = tokenizer.decode(greedy(model, ids, num_tokens), skip_special_tokens=False)
    for question in QUESTIONS:
        text = render(Exchange(question=question, answer="")).removesuffix(EOS)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        answer = tokenizer.decode(greedy(model, ids, num_tokens), skip_special_tokens=False)
        texts[question] = answer
    return texts


def main() -> None:
    """Measure the bundled checkpoint and print JSON."""
    parser = argparse.ArgumentParser(description="Measure the bundled checkpoint.")
    parser.add_argument("data", type=Path, help="file that tools.training.dataset wrote")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--max-tokens", type=int, default=None, help="of the held-out text")
    parser.add_argument("--sample-tokens", type=int, default=160)
    arguments = parser.parse_args()
    corpus = load_corpus(arguments.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_checkpoint(arguments.checkpoint).to(device).eval()
    tokens = corpus.held_out[: arguments.max_tokens]
    quality = measure(model, tokens, corpus.token_bytes)
    tokenizer = Tokenizer.from_file(str(arguments.checkpoint / "tokenizer.json"))
    texts = samples(model, tokenizer, arguments.sample_tokens)
    print(json.dumps({"quality": asdict(quality), "samples": texts}, indent=2))


if __name__ == "__main__":
    main()
