"""A checkpoint folder without weights: the configuration of a shape, and an invented tokenizer.

The key idea of the tokenizer: every token id has a text of its own, a space and a hexadecimal
number, so each token reaches the client as text at once, and whoever counts spaces counts tokens.
It can encode nothing; prompts are sent as ids.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from engine.config import ARCHITECTURE, MODEL_TYPE, DeepseekV3Config

_SPACE = "\u0120"
"""How a byte-level vocabulary writes a space."""


def write_model_folder(folder: Path, config: DeepseekV3Config) -> None:
    """Write what a worker (with dummy weights) and the router read; creates ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "config.json": hf_config(config),
        "tokenizer.json": invent_tokenizer(config.vocab_size),
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def hf_config(config: DeepseekV3Config) -> dict[str, object]:
    """The content of a ``config.json`` from which ``DeepseekV3Config.from_hf`` makes ``config``."""
    fields = dataclasses.asdict(config)
    block, yarn = fields.pop("fp8_block_size"), fields.pop("yarn")
    unquantized = fields.pop("unquantized_modules")
    del fields["remarks"]  # of the file that it came from
    fields["eos_token_id"] = list(fields.pop("eos_token_ids"))
    if yarn is not None:
        fields["rope_scaling"] = {"type": "yarn", **yarn}
    if block:
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [block, block],
            "modules_to_not_convert": list(unquantized),
        }
    return {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, **fields}


def invent_tokenizer(vocab_size: int) -> dict[str, object]:
    """The content of a ``tokenizer.json`` with one word per id."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "vocab": {f"{_SPACE}{token_id:x}": token_id for token_id in range(vocab_size)},
            "merges": [],
        },
    }


def count_tokens(text: str) -> int:
    """Tokens of a text that the invented tokenizer decoded."""
    return text.count(" ")
