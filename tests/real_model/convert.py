"""Writes a GGUF file as a checkpoint that Tandem and transformers read: float32, in safetensors.

::

    python convert.py FILE.gguf FOLDER

transformers does the reading: configuration, tokenizer, chat template and weights, of which those
that are quantized come out as the numbers that they stand for. A head that is the embedding, as the
file has it, is written once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, folder: Path) -> None:
    """Write the checkpoint of ``source`` into ``folder``."""
    where = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    # It names the GGUF file; these weights are plain ones.
    del model.config.quantization_config
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: each.contiguous() for name, each in model.state_dict().items()}
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kept = {name: each for name, each in weights.items() if name not in tied}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
