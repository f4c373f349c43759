"""Between our plain values and their protobuf messages: one pair of functions a type."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from runtime.errors import ERRORS_BY_CODE, ErrorCode, InternalError, TandemError
from runtime.pb import common_pb2, registry_pb2
from runtime.sampling import FinishReason, OutputConstraint, PositionLogprobs, SamplingParams
from runtime.tiers import NO_TIER, Standing, TierTokens
from runtime.version import WIRE, installed_version

_FINISH_TO_PROTO = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
    FinishReason.COMPLETE: common_pb2.FINISH_REASON_COMPLETE,
}
_FINISH_FROM_PROTO = {value: key for key, value in _FINISH_TO_PROTO.items()}


def error_to_proto(error: BaseException, request_id: str = "") -> common_pb2.Error:
    """``error`` for the wire; anything outside our tree becomes INTERNAL with its type's name."""
    if isinstance(error, TandemError):
        return common_pb2.Error(
            code=int(error.code),  # type: ignore[arg-type]  # the numbers are the proto's
            message=error.message,
            request_id=error.request_id or request_id,
            suspect=error.suspect,
            relayed_from=error.relayed_from,
        )
    return common_pb2.Error(
        code=common_pb2.ERROR_CODE_INTERNAL,
        message=f"{type(error).__name__}: {error}",
        request_id=request_id,
    )


def error_from_proto(message: common_pb2.Error, *, relayed_from: str = "") -> TandemError:
    """The typed error that ``message`` stands for; an unknown code is InternalError.

    Whoever passes it on says whose word it is: ``relayed_from``, "instance/rank" of the sender.
    """
    try:
        error_type = ERRORS_BY_CODE[ErrorCode(message.code)]
    except ValueError:
        error_type = InternalError
    return error_type(
        message.message,
        request_id=message.request_id,
        suspect=message.suspect,
        relayed_from=message.relayed_from or relayed_from,
    )


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    """None is "not finished"."""
    return _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: common_pb2.FinishReason) -> FinishReason | None:
    """None is "not finished".

    Raises:
        InternalError: the sender knows more reasons than we do.
    """
    try:
        return _FINISH_FROM_PROTO[value]
    except KeyError:
        text = f"finish_reason = {value} is unknown here. Fix: run one version everywhere"
        raise InternalError(text) from None


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field is set: the receiver applies no defaults."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias) or None,  # an empty one takes as long as all others
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        num_logprobs=params.num_logprobs,
        num_prompt_logprobs=params.num_prompt_logprobs,
        constraint=_constraint_to_proto(params.constraint),
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """The inverse of ``sampling_to_proto`` (floats as float32 left them)."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        num_logprobs=message.num_logprobs,
        num_prompt_logprobs=message.num_prompt_logprobs,
        constraint=_constraint_from_proto(message),
    )


def _constraint_to_proto(constraint: OutputConstraint | None) -> common_pb2.OutputConstraint | None:
    if constraint is None:
        return None
    return common_pb2.OutputConstraint(
        grammar=constraint.grammar,
        starts_after=constraint.starts_after,
        max_tokens_before=constraint.max_tokens_before,
        is_guarded=constraint.is_guarded,
    )


def _constraint_from_proto(message: common_pb2.SamplingParams) -> OutputConstraint | None:
    if not message.HasField("constraint"):
        return None
    return OutputConstraint(
        grammar=message.constraint.grammar,
        starts_after=tuple(message.constraint.starts_after),
        max_tokens_before=message.constraint.max_tokens_before,
        is_guarded=message.constraint.is_guarded,
    )


def standing_to_proto(standing: Standing) -> common_pb2.Standing | None:
    """None where there are no tiers."""
    if standing is NO_TIER or standing == NO_TIER:
        return None
    return common_pb2.Standing(
        tier=standing.tier,
        order=standing.order,
        priority=standing.priority,
        share=standing.share,
        ttft_left_s=standing.ttft_s,
        tpot_s=standing.tpot_s,
    )


def standing_from_proto(message: common_pb2.Standing) -> Standing:
    """The inverse of ``standing_to_proto``; an absent one is that of no tiers."""
    return Standing(
        tier=message.tier,
        order=message.order,
        priority=message.priority,
        share=min(max(message.share, 0.0), 1.0),
        ttft_s=message.ttft_left_s,
        tpot_s=message.tpot_s,
    )


def tier_tokens_to_proto(tiers: Sequence[TierTokens]) -> list[registry_pb2.TierTokens]:
    """None where all is of one tier, which the sum says as well."""
    if len(tiers) < 2:
        return []
    return [
        registry_pb2.TierTokens(order=tier.order, share=tier.share, num_tokens=tier.num_tokens)
        for tier in tiers
    ]


def tier_tokens_from_proto(message: Iterable[registry_pb2.TierTokens]) -> tuple[TierTokens, ...]:
    """The inverse of ``tier_tokens_to_proto``."""
    return tuple(
        TierTokens(tier.order, min(max(tier.share, 0.0), 1.0), tier.num_tokens) for tier in message
    )


def logprobs_to_proto(logprobs: PositionLogprobs) -> common_pb2.PositionLogprobs:
    """One position."""
    return common_pb2.PositionLogprobs(
        logprob=logprobs.logprob,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        rank=logprobs.rank,
    )


def logprobs_from_proto(message: common_pb2.PositionLogprobs) -> PositionLogprobs:
    """One position."""
    tops = tuple(message.top_ids), tuple(message.top_logprobs)
    return PositionLogprobs(message.logprob, *tops, message.rank)


def identity(instance: str, epoch: int, rank: int = 0) -> common_pb2.WorkerIdentity:
    """A WorkerIdentity message."""
    return common_pb2.WorkerIdentity(instance=instance, epoch=epoch, rank=rank)


def same_identity(left: common_pb2.WorkerIdentity, right: common_pb2.WorkerIdentity) -> bool:
    """Whether both name the same rank of the same life of the same worker."""
    return (left.instance, left.epoch, left.rank) == (right.instance, right.epoch, right.rank)


@functools.cache
def own_wire() -> common_pb2.Wire:
    """What this process speaks; not to be changed."""
    return common_pb2.Wire(number=WIRE, version=installed_version() or "")


def why_refused(peer: str, theirs: common_pb2.Wire) -> str:
    """Why ``peer``, which speaks ``theirs``, and we cannot work together; empty: we can.

    One that names no number is refused as well: messages changed before there was one, and nothing
    tells what it knows of them.
    """
    if theirs.number == WIRE:
        return ""
    return (
        f"{peer} speaks {_wire_text(theirs)}, this process {_wire_text(own_wire())}. "
        "Fix: one version of Tandem on both, or two of the same wire number"
    )


def _wire_text(wire: common_pb2.Wire) -> str:
    return f"wire {wire.number} (Tandem {wire.version or 'of an unknown version'})"
