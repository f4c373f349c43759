from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KeyLimit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_LIMIT_UNSPECIFIED: _ClassVar[KeyLimit]
    KEY_LIMIT_REQUESTS: _ClassVar[KeyLimit]
    KEY_LIMIT_TOKENS: _ClassVar[KeyLimit]
    KEY_LIMIT_CONCURRENCY: _ClassVar[KeyLimit]
KEY_LIMIT_UNSPECIFIED: KeyLimit
KEY_LIMIT_REQUESTS: KeyLimit
KEY_LIMIT_TOKENS: KeyLimit
KEY_LIMIT_CONCURRENCY: KeyLimit

class KeyCharge(_message.Message):
    __slots__ = ("name", "holder", "num_tokens", "num_open")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OPEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    holder: str
    num_tokens: int
    num_open: int
    def __init__(self, name: _Optional[str] = ..., holder: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_open: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("charge", "requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
    CHARGE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENT_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    charge: KeyCharge
    requests_per_minute: int
    tokens_per_minute: int
    max_concurrent_requests: int
    def __init__(self, charge: _Optional[_Union[KeyCharge, _Mapping]] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., max_concurrent_requests: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("refused_by", "retry_after_s", "requests", "tokens", "num_tokens")
    REFUSED_BY_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    refused_by: KeyLimit
    retry_after_s: float
    requests: BucketLevel
    tokens: BucketLevel
    num_tokens: int
    def __init__(self, refused_by: _Optional[_Union[KeyLimit, str]] = ..., retry_after_s: _Optional[float] = ..., requests: _Optional[_Union[BucketLevel, _Mapping]] = ..., tokens: _Optional[_Union[BucketLevel, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class BucketLevel(_message.Message):
    __slots__ = ("limit", "remaining", "reset_s")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    RESET_S_FIELD_NUMBER: _ClassVar[int]
    limit: int
    remaining: int
    reset_s: float
    def __init__(self, limit: _Optional[int] = ..., remaining: _Optional[int] = ..., reset_s: _Optional[float] = ...) -> None: ...

class SpendRequest(_message.Message):
    __slots__ = ("name", "num_tokens", "num_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_tokens: int
    num_requests: float
    def __init__(self, name: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_requests: _Optional[float] = ...) -> None: ...

class SpendResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("charge", "num_tokens", "num_taken", "num_output")
    CHARGE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    charge: KeyCharge
    num_tokens: int
    num_taken: int
    num_output: int
    def __init__(self, charge: _Optional[_Union[KeyCharge, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_taken: _Optional[int] = ..., num_output: _Optional[int] = ...) -> None: ...

class SettleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
