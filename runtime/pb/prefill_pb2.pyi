from runtime.pb import common_pb2 as _common_pb2
from runtime.pb import decode_pb2 as _decode_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunRequest(_message.Message):
    __slots__ = ("request_id", "expected", "context_token_ids", "num_output_tokens", "sampling", "reservation", "timeout_s", "cache_salt", "standing", "waited_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    expected: _common_pb2.WorkerIdentity
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    sampling: _common_pb2.SamplingParams
    reservation: _decode_pb2.Reservation
    timeout_s: float
    cache_salt: str
    standing: _common_pb2.Standing
    waited_s: float
    def __init__(self, request_id: _Optional[str] = ..., expected: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., context_token_ids: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., reservation: _Optional[_Union[_decode_pb2.Reservation, _Mapping]] = ..., timeout_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., standing: _Optional[_Union[_common_pb2.Standing, _Mapping]] = ..., waited_s: _Optional[float] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("first_token", "error")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    error: _common_pb2.Error
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "prompt_logprobs", "finish_reason", "num_cached_tokens", "timings", "index")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _common_pb2.PositionLogprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    num_cached_tokens: int
    timings: _common_pb2.Timings
    index: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_cached_tokens: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("request_id", "nonce", "decode", "remember_s", "prefill")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    REMEMBER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    nonce: int
    decode: _common_pb2.WorkerIdentity
    remember_s: float
    prefill: _common_pb2.WorkerIdentity
    def __init__(self, request_id: _Optional[str] = ..., nonce: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., remember_s: _Optional[float] = ..., prefill: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ("drained",)
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    def __init__(self, drained: bool = ...) -> None: ...
