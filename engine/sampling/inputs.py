"""What the sampler is given and what it gives back, one of each per row of logits."""

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import InvalidRequestError
from runtime.sampling import PositionLogprobs, SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """The request behind one row of logits. The sequences are read during the call only.

    The output index, which with the seed determines the noise, is `len(output_token_ids)`.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


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
