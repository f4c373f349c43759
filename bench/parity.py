"""Compare this engine with `transformers` on the same checkpoint: logits and greedy tokens.

Both sides get float32 weights, and what stands in the checkpoint is read twice: by our loader, and
here for `transformers` by code that shares nothing with it, FP8 included; `config.json` is read by
`transformers` itself. So a wrong reading shows as a difference. The logits of random prompts are
compared position by position; then both continue each prompt greedily, on their own tokens and
through their own caches, so that decoding is compared too. `transformers` is needed for nothing
else and is imported only here.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.batch import build_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.generate import generate
from engine.model.registry import find_spec
from engine.model.spec import CommonConfig, ServedModel
from engine.request import Request, ScheduledRequest, num_blocks_for
from runtime.errors import ConfigError
from runtime.sampling import SamplingParams

LOGIT_TOLERANCE = 1e-4
"""Largest accepted difference of two float32 implementations, relative to the largest logit."""

_PROMPT_LENGTHS = (1, 7, 33, 64, 129, 250)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParity:
    """One prompt: its length, the logit error over it, and how many greedy tokens agree.

    `num_equal_tokens` counts the tokens before the first difference, out of `num_steps`.
    """

    num_prompt_tokens: int
    relative_error: float
    num_steps: int
    num_equal_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """All prompts of a comparison."""

    path: Path
    prompts: tuple[PromptParity, ...]

    @property
    def max_relative_error(self) -> float:
        """Largest logit difference, relative to the largest logit of its prompt."""
        return max(prompt.relative_error for prompt in self.prompts)

    @property
    def greedy_agreement(self) -> float:
        """Share of greedy tokens before the first difference of their prompt."""
        steps = sum(prompt.num_steps for prompt in self.prompts)
        return sum(prompt.num_equal_tokens for prompt in self.prompts) / max(steps, 1)

    @property
    def passed(self) -> bool:
        """Whether logits are within `LOGIT_TOLERANCE` and all greedy tokens agree."""
        return self.max_relative_error <= LOGIT_TOLERANCE and self.greedy_agreement == 1.0

    def format(self) -> str:
        """Return a table for people."""
        lines = [f"parity with transformers, float32: {self.path}"]
        lines += ["prompt tokens   relative logit error   equal greedy tokens"]
        lines += [
            f"{prompt.num_prompt_tokens:13d}   {prompt.relative_error:20.2e}   "
            f"{prompt.num_equal_tokens:8d} of {prompt.num_steps}"
            for prompt in self.prompts
        ]
        verdict = "PASS" if self.passed else "FAIL"
        lines += [
            f"{verdict}: largest error {self.max_relative_error:.2e} (limit {LOGIT_TOLERANCE:.0e}),"
            f" greedy agreement {self.greedy_agreement:.1%}"
        ]
        return "\n".join(lines)


@torch.inference_mode()
def compare_with_transformers(
    path: str | Path, *, num_prompts: int = 4, num_steps: int = 64, seed: int = 0
) -> ParityReport:
    """Load a checkpoint into both implementations and compare them.

    Args:
        path: checkpoint folder that both can load.
        num_prompts: random prompts, of different and also odd lengths.
        num_steps: greedy tokens after each, or half of the context where that is less.
        seed: of the prompts.

    Raises:
        ConfigError: not a model of this engine, or one whose context has no room for a comparison.
        CheckpointError: tensors that do not fit.
        RuntimeError: `transformers` is not installed.
    """
    path = Path(path)
    model = build_model(path)
    num_steps = _fitting_steps(model.config, num_steps)
    theirs = load_theirs(path)
    prompts = _draw_prompts(model.config, num_prompts, num_steps, seed)
    greedy = SamplingParams(temperature=0.0, max_tokens=num_steps)
    outputs = generate(model, prompts, greedy)
    results = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits, tokens = _run_theirs(theirs, prompt, num_steps)
        error = (_prompt_logits(model, prompt) - logits).abs().max() / logits.abs().max()
        results.append(
            PromptParity(
                num_prompt_tokens=len(prompt),
                relative_error=float(error),
                num_steps=num_steps,
                num_equal_tokens=_common_prefix(output.token_ids, tokens),
            )
        )
    return ParityReport(path=path, prompts=tuple(results))


def _fitting_steps(config: CommonConfig, num_steps: int) -> int:
    context = config.max_position_embeddings
    if context < 2:
        problem = "no room for a prompt and a token after it"
        raise ConfigError("max_position_embeddings", context, problem, "2 or more")
    return min(num_steps, context // 2)


def _draw_prompts(
    config: CommonConfig, num_prompts: int, num_steps: int, seed: int
) -> list[list[int]]:
    longest = max(1, config.max_position_embeddings - num_steps - 1)
    generator = torch.Generator().manual_seed(seed)
    lengths = [
        min(_PROMPT_LENGTHS[-1 - i % len(_PROMPT_LENGTHS)], longest) for i in range(num_prompts)
    ]
    return [
        torch.randint(config.vocab_size, (length,), generator=generator).tolist()
        for length in lengths
    ]


def _prompt_logits(model: ServedModel, prompt: list[int]) -> Tensor:
    """Return our logits at every position of the prompt, [T, vocab_size]."""
    kv_pool = build_kv_pool(model, num_blocks_for(len(prompt), 64) + 1)
    request = Request(
        request_id="parity", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0)
    )
    request.block_table = list(range(1, kv_pool.num_blocks))
    batch = build_forward_batch([ScheduledRequest(request, len(prompt))], kv_pool.block_size)
    return model.compute_logits(model.forward(batch, kv_pool))


def load_theirs(path: Path) -> Any:
    """Return the model of `transformers` with the weights of a checkpoint, in float32.

    Raises:
        RuntimeError: `transformers` is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(
            "the comparison needs transformers: pip install 'tandem-serve[dev]'"
        ) from error
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    quantization = fields.pop("quantization_config", None) or {}
    architecture = find_spec(fields).architecture
    kind = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    config = kind.from_dict(fields)
    # Its faster products of experts take widths of whole 16 bytes only.
    config._experts_implementation = "eager"
    weights = _read_tensors(path, quantization.get("weight_block_size") or [128, 128])
    of_decoder = {
        name: weight
        for name, weight in weights.items()
        if _layer_of(name) < config.num_hidden_layers
    }
    theirs = getattr(transformers, architecture).from_pretrained(
        None, config=config, state_dict=of_decoder, dtype=torch.float32
    )
    return theirs.eval()


def _layer_of(name: str) -> int:
    """Return the layer of a tensor, -1 if it belongs to none."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


def _read_tensors(path: Path, block: Sequence[int]) -> dict[str, Tensor]:
    """Read all tensors in float32; of an FP8 matrix each block times its own scale."""
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored.update(load_file(file))
    scales = {
        name: stored.pop(f"{name}_scale_inv")
        for name, tensor in list(stored.items())
        if tensor.dtype == torch.float8_e4m3fn
    }
    tensors = {name: tensor.to(torch.float32) for name, tensor in stored.items()}
    for name, scale in scales.items():
        for row, row_scales in enumerate(scale.tolist()):
            rows = tensors[name].narrow(0, *_extent(row, block[0], tensors[name].shape[0]))
            for column, value in enumerate(row_scales):
                rows.narrow(1, *_extent(column, block[1], rows.shape[1])).mul_(value)
    return tensors


def _extent(index: int, size: int, total: int) -> tuple[int, int]:
    """Return start and length of a block, of which the last may be partial."""
    return index * size, min(size, total - index * size)


def _run_theirs(theirs: Any, prompt: list[int], num_steps: int) -> tuple[Tensor, list[int]]:
    """Return logits [T, vocab_size] of the prompt and the greedy continuation."""
    output = theirs(torch.tensor([prompt]), use_cache=True)
    logits: Tensor = output.logits[0].float()
    tokens: list[int] = []
    while len(tokens) < num_steps:
        tokens.append(int(output.logits[0, -1].argmax()))
        output = theirs(
            torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
        )
    return logits, tokens


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours))
