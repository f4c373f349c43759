from runtime.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordRequest(_message.Message):
    __slots__ = ("passes_per_window", "num_windows")
    PASSES_PER_WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    passes_per_window: int
    num_windows: int
    def __init__(self, passes_per_window: _Optional[int] = ..., num_windows: _Optional[int] = ...) -> None: ...

class RecordFrame(_message.Message):
    __slots__ = ("model", "window")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    model: ExpertModel
    window: LoadWindow
    def __init__(self, model: _Optional[_Union[ExpertModel, _Mapping]] = ..., window: _Optional[_Union[LoadWindow, _Mapping]] = ...) -> None: ...

class ExpertModel(_message.Message):
    __slots__ = ("worker", "role", "name", "layers", "num_experts", "top_k", "num_groups", "topk_group", "hidden_size", "moe_intermediate_size", "expert_bytes", "num_draft_layers", "num_ranks", "num_endpoints", "num_slots", "placement")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOPK_GROUP_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MOE_INTERMEDIATE_SIZE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    role: _common_pb2.Role
    name: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    num_experts: int
    top_k: int
    num_groups: int
    topk_group: int
    hidden_size: int
    moe_intermediate_size: int
    expert_bytes: int
    num_draft_layers: int
    num_ranks: int
    num_endpoints: int
    num_slots: int
    placement: bytes
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., name: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ..., num_experts: _Optional[int] = ..., top_k: _Optional[int] = ..., num_groups: _Optional[int] = ..., topk_group: _Optional[int] = ..., hidden_size: _Optional[int] = ..., moe_intermediate_size: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., num_draft_layers: _Optional[int] = ..., num_ranks: _Optional[int] = ..., num_endpoints: _Optional[int] = ..., num_slots: _Optional[int] = ..., placement: _Optional[bytes] = ...) -> None: ...

class LoadWindow(_message.Message):
    __slots__ = ("first_pass", "end_pass", "counts", "placement")
    FIRST_PASS_FIELD_NUMBER: _ClassVar[int]
    END_PASS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    first_pass: int
    end_pass: int
    counts: bytes
    placement: bytes
    def __init__(self, first_pass: _Optional[int] = ..., end_pass: _Optional[int] = ..., counts: _Optional[bytes] = ..., placement: _Optional[bytes] = ...) -> None: ...
