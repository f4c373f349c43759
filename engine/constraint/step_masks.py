"""The masks of one step: which rows of logits are bound, and what their matchers leave.

Called on the thread that launches steps, between a step's forward and its sampling. What the step
before has sampled decides the masks of this one, so `read` waits for it; only where a row is bound,
and with this step's forward behind it on the device, which the host uses for the masks meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from engine.constraint.matcher import Matcher, fill_masks, num_mask_words
from engine.host_copy import host_tensor
from engine.request import ScheduledRequest
from engine.sampling.token_mask import TokenMask

ReadTokens = Callable[[], Mapping[int, int]]
"""Waits for the tokens of the step before; by `id` of their requests, without those that failed."""


def mask_of_step(
    samplers: Sequence[ScheduledRequest],
    vocab_size: int,
    read: ReadTokens,
    device: torch.device,
) -> TokenMask | None:
    """Bring the matchers of a step up to date and ask them; None where no row is bound.

    Args:
        samplers: what the rows of logits are of, in order.
        vocab_size: of the model.
        read: called at most once, and not where every token is known.
        device: to which the mask goes.
    """
    assert all(item.request.is_ready for item in samplers), "a constraint without its matcher"
    constrained = [
        (row, item, item.request.matcher)
        for row, item in enumerate(samplers)
        if item.request.matcher is not None
    ]
    if not constrained:
        return None
    unread = read() if any(item.num_unread for _, item, _ in constrained) else {}
    bound: list[tuple[int, Matcher]] = []
    for row, item, matcher in constrained:
        request = item.request
        matcher.follow(request.output_token_ids)
        if item.num_unread:
            if id(request) not in unread:
                continue  # it is about to end; nobody will hear of this token
            matcher.take(len(request.output_token_ids), unread[id(request)])
        if matcher.is_binding:
            bound.append((row, matcher))
    if not bound:
        return None
    # Where the copy to the device begins: a mask of 64 rows is a megabyte.
    words = host_tensor((len(bound), num_mask_words(vocab_size)), torch.int32, device)
    fill_masks([matcher for _, matcher in bound], words.numpy())
    return TokenMask(rows=np.array([row for row, _ in bound], dtype=np.int64), words=words)


def take_sampled(item: ScheduledRequest, token_id: int) -> None:
    """Tell a request's matcher the token that a step has sampled, before the request has it."""
    request = item.request
    if request.matcher is not None:
        request.matcher.follow(request.output_token_ids)
        request.matcher.take(item.end - request.num_prompt_tokens, token_id)
