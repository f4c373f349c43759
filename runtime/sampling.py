"""What a request asks of the sampler, and what the sampler says of a position: plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a request ended. ``STOP`` covers stop tokens; stop strings are the router's."""

    STOP = "stop"
    COMPLETE = "complete"
    """Nothing can follow by the request's constraint; unlike a stop token, the last one is text."""
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """What the output must look like; see the message of this name in ``common.proto``."""

    grammar: str = ""
    """What xgrammar's ``Grammar.serialize_json()`` gives; empty: none."""
    starts_after: tuple[int, ...] = ()
    """The grammar holds after the first place where these tokens end; empty: from the start."""
    max_tokens_before: int = 0
    """Output tokens before ``starts_after`` is forced; 0: no limit."""
    is_guarded: bool = False
    """A client wrote what the grammar is made of: its masks may take any time to make."""


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request. Validated and complete: the router sets defaults.

    Nobody changes it. It is not frozen because making it would take three times as long.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output tokens; 1 is off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Unsigned 64 bits. Token ``i`` of the output depends on (seed, i) and the logits alone."""
    max_tokens: int = 16
    min_tokens: int = 0
    """Stop tokens are masked before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int = -1
    """-1: none; 0: of the chosen token; n: also the n best."""
    num_prompt_logprobs: int = -1
    constraint: OutputConstraint | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without noise."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities (nats) of the raw distribution at one position, n best, falling."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0
    """How many tokens are at least as likely as the one that stands there; 0: not computed."""


MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of the prompts of a request, of all positions together.

Those of one choice come in one message with its first token; each takes up to 100 bytes on its way.
"""


def num_prompt_values(num_tokens: int, num_top: int) -> int:
    """Log-probabilities that a prompt of ``num_tokens`` has where each position has the n best."""
    return num_tokens * (1 + num_top) if num_top >= 0 else 0


def finish_reason_after(
    token_id: int,
    *,
    num_output_tokens: int,
    num_tokens: int,
    params: SamplingParams,
    max_model_len: int,
) -> FinishReason | None:
    """Whether the request ends with ``token_id``, the latest of its output tokens.

    ``num_output_tokens`` counts it; ``num_tokens`` counts prompt and output: at ``max_model_len``
    there is no position for another token.
    """
    if token_id in params.stop_token_ids and num_output_tokens > params.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
