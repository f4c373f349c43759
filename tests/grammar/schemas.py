"""Random JSON schemas, and outputs that are drawn under their grammars from random logits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.host_copy import HostCopies
from engine.sampling.inputs import SamplingInput
from engine.sampling.sampler import Sampler
from engine.sampling.token_mask import TokenMask
from grammar.constraints import Constraints
from grammar.matcher import Matcher, num_mask_words
from runtime.sampling import OutputConstraint, SamplingParams

MODEL_DIR = Path(__file__).parents[2] / "deploy" / "models" / "tandem-python"
VOCAB = 4096
EOS = 1
MOST_TOKENS = 400
_NAMES = ("a", "name", "größe", "x y", "日本", 'q"uote', "back\\slash")


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose instances are short enough to be drawn at random."""
    leaves: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "integer", "minimum": 0, "maximum": draw.randrange(1, 5000)},
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": draw.sample(["red", "gruen\n", 7, None, True, "☃"], 3)},
        lambda: {"const": draw.choice(["x", 12, {"k": [1]}])},
        lambda: {"type": "string", "maxLength": draw.randrange(1, 6)},
        lambda: {"type": "string", "pattern": draw.choice(["^[a-c]{1,4}$", "^(ab|cd)[0-9]{2}$"])},
        lambda: {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    ]
    if depth >= 3 or (depth and draw.random() < 0.5):
        return draw.choice(leaves)()
    if draw.random() < 0.3:
        low = draw.randrange(2)
        items = random_schema(draw, depth + 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    names = draw.sample(_NAMES, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def grammar_of(schema: dict[str, Any]) -> str:
    """What a router sends."""
    import xgrammar

    text = json.dumps(schema)
    return xgrammar.Grammar.from_json_schema(text, any_whitespace=False).serialize_json()


def serialized(ebnf: str) -> str:
    """The same of EBNF."""
    import xgrammar

    return xgrammar.Grammar.from_ebnf(ebnf).serialize_json()


class Writer:
    """Draws outputs from random logits under a grammar."""

    def __init__(self) -> None:
        self.constraints = Constraints(MODEL_DIR, VOCAB)
        self._sampler = Sampler(VOCAB)

    def matcher(self, params: SamplingParams, output: list[int] | None = None) -> Matcher:
        matcher = self.constraints.begin(params, output or ()).result()
        assert matcher is not None
        return matcher

    def write(self, grammars: Sequence[str], seed: int) -> list[list[int]]:
        """Outputs that their grammars end, drawn side by side; stop tokens left out."""
        inputs = [_input(grammar, seed + row) for row, grammar in enumerate(grammars)]
        matchers = [self.matcher(item.params) for item in inputs]
        generator = torch.Generator().manual_seed(seed)
        live = list(range(len(inputs)))
        while live:
            words = np.empty((len(live), num_mask_words(VOCAB)), dtype=np.int32)
            for place, row in enumerate(live):
                matchers[row].fill(words[place])
            logits = torch.randn(len(live), VOCAB, generator=generator) * 3
            mask = TokenMask(
                rows=np.arange(len(live), dtype=np.int64), words=torch.from_numpy(words)
            )
            tokens = self._sample(logits, [inputs[row] for row in live], mask)
            for row, token in zip(live, tokens, strict=True):
                output = inputs[row].output_token_ids
                assert isinstance(output, list)
                output.append(token)
                assert len(output) < MOST_TOKENS, output
                matchers[row].follow(output)
                assert matchers[row].error is None, matchers[row].error
            live = [row for row in live if not matchers[row].is_over]
        return [[token for token in item.output_token_ids if token != EOS] for item in inputs]

    def _sample(
        self, logits: torch.Tensor, inputs: list[SamplingInput], mask: TokenMask
    ) -> list[int]:
        copies = HostCopies(logits.device)
        pending = self._sampler.launch(logits, inputs, copies, mask=mask)
        return [token.token_id for token in pending.collect()]


def _input(grammar: str, seed: int) -> SamplingInput:
    params = SamplingParams(
        temperature=[0.0, 1.0, 1.5][seed % 3],
        seed=seed,
        stop_token_ids=(EOS,) if seed % 2 else (),
        constraint=OutputConstraint(grammar=grammar),
    )
    return SamplingInput(params, [5], [])
