from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScaleRequest(_message.Message):
    __slots__ = ("role", "count", "relative", "deadline_s", "dry_run", "who")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    role: str
    count: int
    relative: bool
    deadline_s: float
    dry_run: bool
    who: str
    def __init__(self, role: _Optional[str] = ..., count: _Optional[int] = ..., relative: bool = ..., deadline_s: _Optional[float] = ..., dry_run: bool = ..., who: _Optional[str] = ...) -> None: ...

class DrainInstanceRequest(_message.Message):
    __slots__ = ("instance", "deadline_s", "who")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    instance: str
    deadline_s: float
    who: str
    def __init__(self, instance: _Optional[str] = ..., deadline_s: _Optional[float] = ..., who: _Optional[str] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("target", "rolling", "allow_gap", "deadline_s", "dry_run", "who")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ROLLING_FIELD_NUMBER: _ClassVar[int]
    ALLOW_GAP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    target: str
    rolling: bool
    allow_gap: bool
    deadline_s: float
    dry_run: bool
    who: str
    def __init__(self, target: _Optional[str] = ..., rolling: bool = ..., allow_gap: bool = ..., deadline_s: _Optional[float] = ..., dry_run: bool = ..., who: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("config", "allow_gap", "deadline_s", "dry_run", "who")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    ALLOW_GAP_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    config: str
    allow_gap: bool
    deadline_s: float
    dry_run: bool
    who: str
    def __init__(self, config: _Optional[str] = ..., allow_gap: bool = ..., deadline_s: _Optional[float] = ..., dry_run: bool = ..., who: _Optional[str] = ...) -> None: ...

class OperationUpdate(_message.Message):
    __slots__ = ("time", "plan", "step", "outcome")
    TIME_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    time: float
    plan: OperationPlan
    step: OperationStep
    outcome: Outcome
    def __init__(self, time: _Optional[float] = ..., plan: _Optional[_Union[OperationPlan, _Mapping]] = ..., step: _Optional[_Union[OperationStep, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class OperationPlan(_message.Message):
    __slots__ = ("what", "start", "restart", "stop", "changes", "notes", "sizes", "num_devices", "num_devices_now")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICES_NOW_FIELD_NUMBER: _ClassVar[int]
    what: str
    start: _containers.RepeatedScalarFieldContainer[str]
    restart: _containers.RepeatedScalarFieldContainer[str]
    stop: _containers.RepeatedScalarFieldContainer[str]
    changes: _containers.RepeatedCompositeFieldContainer[FieldChange]
    notes: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedCompositeFieldContainer[RoleSize]
    num_devices: int
    num_devices_now: int
    def __init__(self, what: _Optional[str] = ..., start: _Optional[_Iterable[str]] = ..., restart: _Optional[_Iterable[str]] = ..., stop: _Optional[_Iterable[str]] = ..., changes: _Optional[_Iterable[_Union[FieldChange, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[_Union[RoleSize, _Mapping]]] = ..., num_devices: _Optional[int] = ..., num_devices_now: _Optional[int] = ...) -> None: ...

class RoleSize(_message.Message):
    __slots__ = ("role", "instances_now", "instances", "ranks")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_NOW_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    role: str
    instances_now: int
    instances: int
    ranks: int
    def __init__(self, role: _Optional[str] = ..., instances_now: _Optional[int] = ..., instances: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class FieldChange(_message.Message):
    __slots__ = ("field", "old", "new", "effect")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    field: str
    old: str
    new: str
    effect: str
    def __init__(self, field: _Optional[str] = ..., old: _Optional[str] = ..., new: _Optional[str] = ..., effect: _Optional[str] = ...) -> None: ...

class OperationStep(_message.Message):
    __slots__ = ("instance", "text", "num_requests_left", "num_tokens_left")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_LEFT_FIELD_NUMBER: _ClassVar[int]
    instance: str
    text: str
    num_requests_left: int
    num_tokens_left: int
    def __init__(self, instance: _Optional[str] = ..., text: _Optional[str] = ..., num_requests_left: _Optional[int] = ..., num_tokens_left: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("ok", "message", "seconds")
    OK_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    message: str
    seconds: float
    def __init__(self, ok: bool = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("follow", "most")
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    follow: bool
    most: int
    def __init__(self, follow: bool = ..., most: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("time", "kind", "who", "instance", "text", "source")
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    time: float
    kind: str
    who: str
    instance: str
    text: str
    source: str
    def __init__(self, time: _Optional[float] = ..., kind: _Optional[str] = ..., who: _Optional[str] = ..., instance: _Optional[str] = ..., text: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class ReadLogRequest(_message.Message):
    __slots__ = ("process", "offset", "max_bytes")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    process: str
    offset: int
    max_bytes: int
    def __init__(self, process: _Optional[str] = ..., offset: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class ReadLogResponse(_message.Message):
    __slots__ = ("data", "offset")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...
