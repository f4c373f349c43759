"""The real model in transformers, in this process: what a cluster's answers are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A token that is not the one that transformers finds likeliest."""

    position: int
    """In the answer."""
    margin: float
    """By which the logit of the likeliest is above that of the token: 0 is a tie."""


class Reference:
    """Float32, without a KV cache: every position is computed from the whole text before it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()
        self.eos_token_id: int = self._model.config.eos_token_id

    def prompt_of(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation, by the checkpoint's own template."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with what the tokenizer itself puts around it."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The greedy answer by its own loop and KV cache, the token that ends it included."""
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": max_tokens}
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer

    def differences(self, prompt: Sequence[int], answer: Sequence[int]) -> list[Difference]:
        """Where ``answer`` is not greedy.

        Each token is judged behind those of the answer before it, so that none means by induction
        that the greedy answer is ``answer``, and that one difference does not hide what follows.
        """
        logits = self._logits([*prompt, *answer], len(answer) + 1)[:-1]
        tokens = torch.tensor(answer)
        margins = logits.amax(-1) - logits.gather(-1, tokens[:, None])[:, 0]
        wrong = (logits.argmax(-1) != tokens).nonzero()[:, 0].tolist()
        return [Difference(position=i, margin=float(margins[i])) for i in wrong]

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of each text, the log-probability of each token but the first, behind those before it."""
        rows = [torch.tensor(text) for text in texts]
        # Nothing looks at what comes after it, so what fills up the shorter ones changes nothing.
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.inference_mode():
            logits = self._model(ids, use_cache=False).logits.float()
        found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return [row[: len(text) - 1].tolist() for row, text in zip(found, texts, strict=True)]

    def _logits(self, ids: Sequence[int], last: int) -> Tensor:
        """Of the last positions, [last, vocab]."""
        with torch.inference_mode():
            out = self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=last)
        logits: Tensor = out.logits[0].float()
        return logits
