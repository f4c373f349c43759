from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallBatch(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[CarriedCall]
    def __init__(self, calls: _Optional[_Iterable[_Union[CarriedCall, _Mapping]]] = ...) -> None: ...

class CarriedCall(_message.Message):
    __slots__ = ("number", "method", "request", "traceparent", "tracestate")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    number: int
    method: str
    request: bytes
    traceparent: str
    tracestate: str
    def __init__(self, number: _Optional[int] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class AnswerBatch(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[CarriedAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[CarriedAnswer, _Mapping]]] = ...) -> None: ...

class CarriedAnswer(_message.Message):
    __slots__ = ("number", "response", "status_code", "details")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_CODE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: bytes
    status_code: int
    details: str
    def __init__(self, number: _Optional[int] = ..., response: _Optional[bytes] = ..., status_code: _Optional[int] = ..., details: _Optional[str] = ...) -> None: ...
