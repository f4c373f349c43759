"""Training of the bundled model: one GPU, one command, a few minutes.

No auxiliary loss balances the experts: the routing bias is nudged after every step towards even
load (as in the DeepSeek-V3 report, arXiv 2412.19437, section 2.1.2), and whatever skew remains is
real. In the last part of training the forward pass reads weights rounded to block FP8 while the
optimiser keeps the float32 ones, so the stored FP8 weights are the ones the loss was measured on.

    python -m tools.training.train .train/tokens.safetensors --out deploy/models/tandem-python
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.weights.fp8 import dequantize_block, quantize_block
from tools.training.architecture import CONTEXT, model_config
from tools.training.checkpoint import load_checkpoint, save_checkpoint
from tools.training.dataset import CHECKPOINT, TokenisedCorpus, batches, load_corpus
from tools.training.evaluate import measure
from tools.training.model import TrainedModel
from tools.training.muon import Muon

_LOG_EVERY: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train.

    Attributes:
        epochs: passes over the training part of the corpus.
        row_length: tokens of a row, the context that is learned.
        num_rows: rows of a step.
        lr: peak learning rate of matrices; embeddings and head take `embedding_lr`.
        embedding_lr: peak learning rate of embedding, head and norms (AdamW).
        router_lr: peak learning rate of the routers (AdamW).
        weight_decay: of matrices, per unit of learning rate.
        dropout: of residual branches and of the embedding.
        warmup_share: share of the steps in which the learning rate rises; it falls linearly after.
        mtp_weight: weight of the MTP loss.
        bias_speed: first step of the routing bias; it falls linearly to zero.
        fp8_share: share of the steps, at the end, with weights rounded to FP8.
        seed: of weights and of the order of documents.
    """

    epochs: float = 22.0
    row_length: int = CONTEXT
    num_rows: int = 16
    lr: float = 4e-3
    embedding_lr: float = 3e-3
    router_lr: float = 1e-3
    weight_decay: float = 0.3
    dropout: float = 0.2
    warmup_share: float = 0.03
    mtp_weight: float = 0.3
    bias_speed: float = 4e-3
    fp8_share: float = 0.2
    seed: int = 20261121

    def num_steps(self, num_tokens: int) -> int:
        """Steps for a corpus of that many tokens."""
        return max(1, round(self.epochs * num_tokens / (self.num_rows * self.row_length)))

    def lr_factor(self, progress: float) -> float:
        """Learning rate over its peak at a progress from 0 to 1."""
        return min(progress / self.warmup_share, (1 - progress) / (1 - self.warmup_share))


def train(corpus: TokenisedCorpus, options: TrainOptions, device: str) -> TrainedModel:
    """Return a trained model; prints a line of JSON every 200 steps."""
    torch.manual_seed(options.seed)
    model = TrainedModel(model_config(), options.dropout).to(device)
    optimizers = make_optimizers(model, options)
    loss_function = _compiled_losses(device)
    num_steps = options.num_steps(len(corpus.train))
    rows = batches(corpus.train, options.row_length, options.num_rows, options.seed)
    started = time.monotonic()
    for step in range(num_steps):
        progress = (step + 0.5) / num_steps
        factor = options.lr_factor(progress)
        ids = next(rows).to(device, non_blocking=True)
        with rounded_to_fp8(model, enabled=progress > 1 - options.fp8_share):
            loss, mtp_loss = loss_function(model, ids)
            torch.autograd.backward(loss + options.mtp_weight * mtp_loss)
        apply_step(optimizers, factor)
        balance(model, options.bias_speed * (1 - progress))
        if step % _LOG_EVERY == 0 or step == num_steps - 1:
            report = {"step": step, "of": num_steps, "seconds": time.monotonic() - started}
            means = {"loss": loss.item(), "mtp_loss": mtp_loss.item()}
            print(json.dumps({**report, **means, **_held_out(model, corpus, device)}), flush=True)
    return model


def losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the main model and of the MTP layer for ids [B, S]."""
    main, drafted = model(ids)
    loss = functional.cross_entropy(main[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    mtp_loss = functional.cross_entropy(drafted[:, :-1].float().flatten(0, 1), ids[:, 2:].flatten())
    return loss, mtp_loss


def make_optimizers(model: TrainedModel, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, AdamW for the rest.

    Each group remembers its peak learning rate as `peak_lr`.
    """
    matrices: list[nn.Parameter] = []
    routers: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if "mlp.gate." in name:
            routers.append(parameter)
        elif parameter.dim() == 1 or "embed_tokens" in name or "lm_head" in name:
            others.append(parameter)
        else:
            matrices.append(parameter)
    muon = Muon(matrices, options.lr, weight_decay=options.weight_decay)
    groups = [
        {"params": others, "lr": options.embedding_lr},
        {"params": routers, "lr": options.router_lr},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def apply_step(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Update the parameters at a learning rate of `factor` times the peak; drop the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def balance(model: TrainedModel, speed: float) -> None:
    """Raise the routing bias of experts below the mean load, lower the others, and zero the load.

    This is all that balances: no loss term rewards even load.
    """
    for router, experts in zip(model.routers(), model.expert_layers(), strict=True):
        load = experts.load
        router.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=speed)
        load.zero_()


@contextmanager
def rounded_to_fp8(model: TrainedModel, *, enabled: bool) -> Iterator[None]:
    """Within the block, parameters that are stored as FP8 hold their rounded values."""
    masters: list[tuple[nn.Parameter, Tensor]] = []
    with torch.no_grad():
        for parameter in _stored_as_fp8(model) if enabled else ():
            # Rows of an expert are a multiple of the block, so a stack of experts is one matrix.
            rounded = dequantize_block(*quantize_block(parameter.flatten(0, -2)))
            masters.append((parameter, parameter.clone()))
            parameter.copy_(rounded.view_as(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, master in masters:
                parameter.copy_(master)


def _stored_as_fp8(model: TrainedModel) -> Iterator[nn.Parameter]:
    kept = ("norm", "embed_tokens", "lm_head", "mlp.gate.", "eh_proj")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not any(part in name for part in kept):
            yield parameter


def _compiled_losses(device: str) -> Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]]:
    if device == "cpu":
        return losses
    compiled = torch.compile(losses, dynamic=False)

    def autocast_losses(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(device, torch.bfloat16):
            loss, mtp_loss = compiled(model, ids)
        return loss, mtp_loss

    return autocast_losses


def _held_out(model: TrainedModel, corpus: TokenisedCorpus, device: str) -> dict[str, object]:
    """Measure on a part of the held-out text, with the load counters left at zero."""
    num_tokens = 32 * CONTEXT if device != "cpu" else 256
    with torch.autocast(device, torch.bfloat16):
        quality = measure(model, corpus.held_out[:num_tokens], corpus.token_bytes)
    return {
        "held_out_loss": quality.loss,
        "mtp_acceptance": quality.mtp_acceptance,
        "load_skew": [round(skew, 2) for skew in quality.load_skew],
    }


def main() -> None:
    """Train, store, and measure before and after FP8."""
    parser = argparse.ArgumentParser(description="Train the bundled model on one GPU.")
    parser.add_argument("data", type=Path, help="file that tools.training.dataset wrote")
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    for name, value in asdict(TrainOptions()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = vars(parser.parse_args())
    data, out = arguments.pop("data"), arguments.pop("out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    corpus = load_corpus(data)
    started = time.monotonic()
    model = train(corpus, TrainOptions(**arguments), device)
    seconds = time.monotonic() - started
    save_checkpoint(model, out)
    torch.set_float32_matmul_precision("highest")
    held_out = corpus.held_out if device != "cpu" else corpus.held_out[:512]
    full = measure(model, held_out, corpus.token_bytes)
    stored = measure(load_checkpoint(out).to(device), held_out, corpus.token_bytes)
    result = {"seconds": seconds, "float32": asdict(full), "fp8": asdict(stored)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
