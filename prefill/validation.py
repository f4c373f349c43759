"""Everything that can be wrong with a Run call, found before the request is queued. Pure.

A worker that truncates, guesses or fails midway would leave decode waiting for KV that never comes,
or decoding garbage; and one bad token id inside a batch would take all its neighbours down. So
whatever passes here can be computed and sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.request import num_blocks_for
from engine.sampling.inputs import validate_request
from runtime.block_hash import max_cached_blocks
from runtime.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    LayoutMismatchError,
    StaleTicketError,
)
from runtime.pb import common_pb2, prefill_pb2
from runtime.sampling import SamplingParams
from runtime.wire import same_identity


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What this worker can serve."""

    identity: common_pb2.WorkerIdentity
    layout_fingerprint: str
    block_size: int
    max_model_len: int
    vocab_size: int
    max_top_logprobs: int


def check_identity(request: prefill_pb2.RunRequest, limits: RunLimits) -> None:
    """Refuse a call for another life of this worker.

    Raises:
        StaleTicketError: the caller means a process that is gone.
    """
    if not same_identity(request.expected, limits.identity):
        expected, ours = request.expected, limits.identity
        raise StaleTicketError(
            f"the call is for {expected.instance} of epoch {expected.epoch:x}, this is "
            f"{ours.instance} of epoch {ours.epoch:x}: reserve again"
        )


def check_run(request: prefill_pb2.RunRequest, sampling: SamplingParams, limits: RunLimits) -> None:
    """Refuse a request that cannot be computed, or a ticket that is not of this prompt.

    Raises:
        InvalidRequestError: the prompt, a token id, or a count; the message names it.
        LayoutMismatchError: decode's blocks have another layout.
        StaleTicketError: the ticket is of another request or another prompt.
        DeadlineExceededError: the time was over before the call came.
    """
    if request.timeout_s <= 0 or request.ticket.timeout_s <= 0:
        raise DeadlineExceededError("the request's time was over before it reached prefill")
    _check_prompt(len(request.prompt_token_ids), limits)
    _check_sampling(sampling, limits)
    validate_request(request.prompt_token_ids, sampling, limits.vocab_size)
    _check_ticket(request, limits)


def _check_prompt(num_tokens: int, limits: RunLimits) -> None:
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty: give at least one token")
    if num_tokens >= limits.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens and the context length is "
            f"{limits.max_model_len}: at most {limits.max_model_len - 1} leave room for an answer"
        )


def _check_sampling(sampling: SamplingParams, limits: RunLimits) -> None:
    most = limits.max_top_logprobs
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", sampling.max_tokens, 1, math.inf),
        ("temperature", sampling.temperature, 0.0, 100.0),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("repetition_penalty", sampling.repetition_penalty, 1e-6, 1e6),
        ("num_logprobs", sampling.num_logprobs, -1, most),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs, -1, most),
    )
    for name, value, least, greatest in ranges:
        if not least <= value <= greatest:  # also where it is no number
            raise InvalidRequestError(f"{name} is {value}: give {least} to {greatest}")
    for token_id in sampling.stop_token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids has {token_id}: the model knows 0..{limits.vocab_size - 1}"
            )


def _check_ticket(request: prefill_pb2.RunRequest, limits: RunLimits) -> None:
    ticket, num_tokens = request.ticket, len(request.prompt_token_ids)
    if ticket.request_id != request.request_id:
        raise StaleTicketError(f"the ticket is of request {ticket.request_id!r}")
    if ticket.layout_fingerprint != limits.layout_fingerprint:
        raise LayoutMismatchError(
            f"decode's KV layout is {ticket.layout_fingerprint}, ours {limits.layout_fingerprint}: "
            "use the same model, kv_dtype and block_size on both workers"
        )
    num_cached_blocks, rest = divmod(ticket.num_cached_tokens, limits.block_size)
    if rest or num_cached_blocks > max_cached_blocks(num_tokens, limits.block_size):
        raise StaleTicketError(
            f"the ticket says that decode holds {ticket.num_cached_tokens} tokens of a prompt of "
            f"{num_tokens}, in blocks of {limits.block_size}"
        )
    num_blocks = num_blocks_for(num_tokens, limits.block_size) - num_cached_blocks
    if len(ticket.block_ids) != num_blocks:
        raise StaleTicketError(
            f"the ticket has {len(ticket.block_ids)} blocks and the prompt needs {num_blocks}: it "
            "is of another prompt"
        )
