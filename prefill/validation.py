"""Everything that can be wrong with a Run call, found before the request is queued. Pure.

A worker that truncates, guesses or fails midway would leave decode waiting for KV that never comes,
or decoding garbage; and one bad token id inside a batch would take all its neighbours down. So
whatever passes here can be computed; and a ticket that passes can be sent under.
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
    StaleTicketError,
)
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.wire import same_identity
from runtime.sampling import MAX_PROMPT_LOGPROBS, SamplingParams, num_prompt_values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """What this worker can serve."""

    identity: common_pb2.WorkerIdentity
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
    """Refuse a request that cannot be computed.

    Raises:
        InvalidRequestError: the context, a token id, a count or a time; the message names it.
        StaleTicketError: the reservation is of another request.
        DeadlineExceededError: the time was over before the call came.
    """
    if not math.isfinite(request.timeout_s):
        raise InvalidRequestError(f"timeout_s is {request.timeout_s}: give seconds")
    if request.timeout_s <= 0:
        raise DeadlineExceededError("the request's time was over before it reached prefill")
    if request.reservation.request_id != request.request_id:
        other = request.reservation.request_id
        raise StaleTicketError(f"the reservation is of request {other!r}")
    _check_context(len(request.context_token_ids), request.num_output_tokens, limits)
    _check_sampling(sampling, limits)
    _check_prompt_logprobs(sampling, len(request.context_token_ids))
    if request.num_output_tokens >= sampling.max_tokens:
        raise InvalidRequestError(
            f"num_output_tokens is {request.num_output_tokens} of max_tokens "
            f"{sampling.max_tokens}: the request was over"
        )
    validate_request(request.context_token_ids, sampling, limits.vocab_size)


def check_ticket(
    ticket: decode_pb2.TransferTicket,
    reservation: decode_pb2.Reservation,
    num_context_tokens: int,
    block_size: int,
) -> None:
    """Refuse a ticket that is not for the whole context of the request that it was claimed for.

    Raises:
        StaleTicketError: the message says what does not fit.
    """
    is_same = same_identity(ticket.decode, reservation.decode)
    if not is_same or ticket.nonce != reservation.nonce:
        raise StaleTicketError(
            f"decode answered with ticket {ticket.nonce:016x} of epoch {ticket.decode.epoch:x} "
            f"for reservation {reservation.nonce:016x} of epoch {reservation.decode.epoch:x}"
        )
    if ticket.request_id != reservation.request_id:
        raise StaleTicketError(f"the ticket is of request {ticket.request_id!r}")
    num_cached_blocks, rest = divmod(ticket.num_cached_tokens, block_size)
    if rest or num_cached_blocks > max_cached_blocks(num_context_tokens, block_size):
        raise StaleTicketError(
            f"the ticket says that decode holds {ticket.num_cached_tokens} tokens of a context of "
            f"{num_context_tokens}, in blocks of {block_size}"
        )
    num_blocks = num_blocks_for(num_context_tokens, block_size) - num_cached_blocks
    if len(ticket.block_ids) != num_blocks:
        raise StaleTicketError(
            f"the ticket has {len(ticket.block_ids)} blocks and the context needs {num_blocks}: it "
            "is of another context"
        )


def _check_context(num_tokens: int, num_output_tokens: int, limits: RunLimits) -> None:
    if num_tokens <= num_output_tokens:
        raise InvalidRequestError(
            f"the prompt is empty: num_output_tokens is {num_output_tokens} of {num_tokens} tokens "
            "of context; give at least one token of prompt"
        )
    if num_tokens >= limits.max_model_len:
        raise InvalidRequestError(
            f"the context has {num_tokens} tokens and the context length is "
            f"{limits.max_model_len}: at most {limits.max_model_len - 1} leave room for an answer"
        )


def _check_prompt_logprobs(sampling: SamplingParams, num_tokens: int) -> None:
    number = num_prompt_values(num_tokens, sampling.num_prompt_logprobs)
    if number > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"num_prompt_logprobs = {sampling.num_prompt_logprobs} for {num_tokens} tokens is "
            f"{number} log-probabilities: at most {MAX_PROMPT_LOGPROBS} of a prompt are computed"
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
