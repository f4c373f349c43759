"""What the sampler is given and what it gives back, one of each per row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import InvalidRequestError
from runtime.sampling import PositionLogprobs, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """The request behind one row of logits. The sequences are read during the call only.

    Where a step is launched before the tokens of the one before it are read, the last output token
    is on the device alone. Rule: what depends on how many tokens there are (noise, minimum length)
    counts it; what depends on which tokens there are (penalties) adds it on the device.

    Attributes:
        params: how to choose.
        prompt_token_ids: the prompt.
        output_token_ids: output tokens that are known.
        num_unread: output tokens after those, 0 or 1.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_unread: int = 0

    @property
    def output_index(self) -> int:
        """Index of the token to choose among the output; with the seed it determines the noise."""
        return len(self.output_token_ids) + self.num_unread


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, with log-probabilities of the raw distribution if the request wants them."""

    token_id: int
    logprobs: PositionLogprobs | None = None


def validate_request(
    prompt_token_ids: Sequence[int], params: SamplingParams, vocab_size: int
) -> None:
    """Refuse token ids that the model does not have, before they reach a shared batch.

    Raises:
        InvalidRequestError: a prompt token or a key of logit_bias is not in [0, vocab_size).
    """
    fields = {"prompt": prompt_token_ids, "logit_bias": tuple(params.logit_bias)}
    for name, token_ids in fields.items():
        if not token_ids:
            continue
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"{name} has token id {token_id}; the model knows 0..{vocab_size - 1}"
                )
