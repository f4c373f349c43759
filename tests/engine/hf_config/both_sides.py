"""The same random checkpoint in this engine and in transformers: logits of one prompt from each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.parity import LOGIT_TOLERANCE, load_theirs
from engine.batch import pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.config import DeepseekV3Config
from runtime.errors import ConfigError
from tests.engine.tiny import random_tensors, tiny_config, write_checkpoint

NUM_TOKENS = 70
BASE: Mapping[str, Any] = {
    **tiny_config(hidden_size=32, num_hidden_layers=2, num_nextn_predict_layers=0, vocab_size=96),
    "hidden_act": "silu",
    "rope_interleave": True,
    "num_key_value_heads": None,
}
"""A small model that says each field of its routing."""


def read(fields: Mapping[str, Any]) -> DeepseekV3Config | ConfigError:
    """Return what we make of a config.json: a model or a refusal."""
    try:
        return DeepseekV3Config.from_hf(fields)
    except ConfigError as error:
        return error


def write(folder: Path, fields: Mapping[str, Any], shaped_by: Mapping[str, Any]) -> Path:
    """Write a checkpoint of `fields` with tensors of the shapes that `shaped_by` has."""
    return write_checkpoint(folder, fields, tensors=random_tensors(shaped_by, seed=3))


def prompt(vocab_size: int) -> list[int]:
    """Return the token ids that both sides run."""
    return [(7 * index * index + 3) % vocab_size for index in range(NUM_TOKENS)]


@torch.inference_mode()
def our_logits(folder: Path) -> Tensor:
    """Return logits at every position of the prompt, [T, vocab_size]."""
    model = build_model(folder)
    length, rows = np.array([NUM_TOKENS]), np.arange(NUM_TOKENS)
    table = np.arange(1, 3, dtype=np.int32)[None]
    batch = pack_forward_batch(
        np.array(prompt(model.config.vocab_size)),
        length,
        length,
        table,
        logits_indices=rows,
        block_size=64,
    )
    return model.compute_logits(model(batch, build_kv_pool(model, 3)))


@torch.inference_mode()
def their_logits(folder: Path) -> Tensor:
    """Return the same of transformers, the last half through its cache."""
    theirs = load_theirs(folder)
    tokens = torch.tensor([prompt(theirs.config.vocab_size)])
    first = theirs(tokens[:, :40], use_cache=True)
    second = theirs(tokens[:, 40:], past_key_values=first.past_key_values, use_cache=True)
    return torch.cat((first.logits[0], second.logits[0]))


def error_between(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def assert_alike(folder: Path) -> None:
    """Both sides compute the same model from a checkpoint."""
    assert error_between(our_logits(folder), their_logits(folder)) <= LOGIT_TOLERANCE
