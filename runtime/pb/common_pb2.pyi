from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_COMPLETE: _ClassVar[FinishReason]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_REQUEST: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]
    ERROR_CODE_TRANSFER_FAILED: _ClassVar[ErrorCode]
    ERROR_CODE_PEER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_STALE_TICKET: _ClassVar[ErrorCode]
    ERROR_CODE_LAYOUT_MISMATCH: _ClassVar[ErrorCode]
    ERROR_CODE_OUT_OF_BLOCKS: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_COMPLETE: FinishReason
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_REQUEST: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ERROR_CODE_TRANSFER_FAILED: ErrorCode
ERROR_CODE_PEER_LOST: ErrorCode
ERROR_CODE_STALE_TICKET: ErrorCode
ERROR_CODE_LAYOUT_MISMATCH: ErrorCode
ERROR_CODE_OUT_OF_BLOCKS: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode

class WorkerIdentity(_message.Message):
    __slots__ = ("instance", "epoch", "rank")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    instance: str
    epoch: int
    rank: int
    def __init__(self, instance: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Wire(_message.Message):
    __slots__ = ("number", "version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: str
    def __init__(self, number: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "max_tokens", "min_tokens", "stop_token_ids", "num_logprobs", "num_prompt_logprobs", "constraint")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    num_prompt_logprobs: int
    constraint: OutputConstraint
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., constraint: _Optional[_Union[OutputConstraint, _Mapping]] = ...) -> None: ...

class OutputConstraint(_message.Message):
    __slots__ = ("grammar", "starts_after", "max_tokens_before", "is_guarded")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STARTS_AFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    IS_GUARDED_FIELD_NUMBER: _ClassVar[int]
    grammar: str
    starts_after: _containers.RepeatedScalarFieldContainer[int]
    max_tokens_before: int
    is_guarded: bool
    def __init__(self, grammar: _Optional[str] = ..., starts_after: _Optional[_Iterable[int]] = ..., max_tokens_before: _Optional[int] = ..., is_guarded: bool = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs", "rank")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "request_id", "suspect", "relayed_from")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FROM_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    request_id: str
    suspect: bool
    relayed_from: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., request_id: _Optional[str] = ..., suspect: bool = ..., relayed_from: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("prefill_queue_s", "prefill_compute_s", "kv_transfer_s", "decode_reserve_s", "decode_admission_s", "kv_exposed_s", "kv_wire_s", "mask_cpu_s")
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_RESERVE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADMISSION_S_FIELD_NUMBER: _ClassVar[int]
    KV_EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    KV_WIRE_S_FIELD_NUMBER: _ClassVar[int]
    MASK_CPU_S_FIELD_NUMBER: _ClassVar[int]
    prefill_queue_s: float
    prefill_compute_s: float
    kv_transfer_s: float
    decode_reserve_s: float
    decode_admission_s: float
    kv_exposed_s: float
    kv_wire_s: float
    mask_cpu_s: float
    def __init__(self, prefill_queue_s: _Optional[float] = ..., prefill_compute_s: _Optional[float] = ..., kv_transfer_s: _Optional[float] = ..., decode_reserve_s: _Optional[float] = ..., decode_admission_s: _Optional[float] = ..., kv_exposed_s: _Optional[float] = ..., kv_wire_s: _Optional[float] = ..., mask_cpu_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_requests_left", "num_tokens_left")
    NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_requests_left: int
    num_tokens_left: int
    def __init__(self, num_requests_left: _Optional[int] = ..., num_tokens_left: _Optional[int] = ...) -> None: ...

class Standing(_message.Message):
    __slots__ = ("tier", "order", "priority", "share", "ttft_left_s", "tpot_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TTFT_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    tier: str
    order: int
    priority: int
    share: float
    ttft_left_s: float
    tpot_s: float
    def __init__(self, tier: _Optional[str] = ..., order: _Optional[int] = ..., priority: _Optional[int] = ..., share: _Optional[float] = ..., ttft_left_s: _Optional[float] = ..., tpot_s: _Optional[float] = ...) -> None: ...
