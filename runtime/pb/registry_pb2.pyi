from runtime.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DepartureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPARTURE_REASON_UNSPECIFIED: _ClassVar[DepartureReason]
    DEPARTURE_REASON_LEFT: _ClassVar[DepartureReason]
    DEPARTURE_REASON_LOST: _ClassVar[DepartureReason]
    DEPARTURE_REASON_REPLACED: _ClassVar[DepartureReason]
DEPARTURE_REASON_UNSPECIFIED: DepartureReason
DEPARTURE_REASON_LEFT: DepartureReason
DEPARTURE_REASON_LOST: DepartureReason
DEPARTURE_REASON_REPLACED: DepartureReason

class WorkerRecord(_message.Message):
    __slots__ = ("identity", "role", "address", "num_ranks", "model", "max_model_len", "layout_fingerprint", "transport", "block_size", "draining", "metrics_address", "pid", "num_parts", "started_ms", "max_num_requests", "num_routers", "kv_block_bytes", "calls_address", "has_experts")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    STARTED_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CALLS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HAS_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.WorkerIdentity
    role: _common_pb2.Role
    address: str
    num_ranks: int
    model: str
    max_model_len: int
    layout_fingerprint: str
    transport: str
    block_size: int
    draining: bool
    metrics_address: str
    pid: int
    num_parts: int
    started_ms: int
    max_num_requests: int
    num_routers: int
    kv_block_bytes: int
    calls_address: str
    has_experts: bool
    def __init__(self, identity: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., address: _Optional[str] = ..., num_ranks: _Optional[int] = ..., model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., layout_fingerprint: _Optional[str] = ..., transport: _Optional[str] = ..., block_size: _Optional[int] = ..., draining: bool = ..., metrics_address: _Optional[str] = ..., pid: _Optional[int] = ..., num_parts: _Optional[int] = ..., started_ms: _Optional[int] = ..., max_num_requests: _Optional[int] = ..., num_routers: _Optional[int] = ..., kv_block_bytes: _Optional[int] = ..., calls_address: _Optional[str] = ..., has_experts: bool = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "num_tokens_waiting", "num_free_blocks", "num_total_blocks", "num_quarantined_blocks", "sequence", "num_requests_blocked", "num_tokens_done", "num_steps_done", "received", "clock_s", "busy_s", "num_requests_done", "tokens_by_tier", "drafts", "waits")
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_BLOCKED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    num_tokens_waiting: int
    num_free_blocks: int
    num_total_blocks: int
    num_quarantined_blocks: int
    sequence: int
    num_requests_blocked: int
    num_tokens_done: int
    num_steps_done: int
    received: _containers.RepeatedCompositeFieldContainer[PeerBytes]
    clock_s: float
    busy_s: float
    num_requests_done: int
    tokens_by_tier: _containers.RepeatedCompositeFieldContainer[TierTokens]
    drafts: DraftCounts
    waits: _containers.RepeatedCompositeFieldContainer[RankBlock]
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_tokens_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., sequence: _Optional[int] = ..., num_requests_blocked: _Optional[int] = ..., num_tokens_done: _Optional[int] = ..., num_steps_done: _Optional[int] = ..., received: _Optional[_Iterable[_Union[PeerBytes, _Mapping]]] = ..., clock_s: _Optional[float] = ..., busy_s: _Optional[float] = ..., num_requests_done: _Optional[int] = ..., tokens_by_tier: _Optional[_Iterable[_Union[TierTokens, _Mapping]]] = ..., drafts: _Optional[_Union[DraftCounts, _Mapping]] = ..., waits: _Optional[_Iterable[_Union[RankBlock, _Mapping]]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("num_verifications", "verified", "accepted", "budget")
    NUM_VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    num_verifications: int
    verified: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    budget: int
    def __init__(self, num_verifications: _Optional[int] = ..., verified: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., budget: _Optional[int] = ...) -> None: ...

class RankBlock(_message.Message):
    __slots__ = ("number", "waits_s", "own_s", "own_mean_s", "num_rows", "num_tokens", "num_context_tokens", "first_waits_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    OWN_S_FIELD_NUMBER: _ClassVar[int]
    OWN_MEAN_S_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_WAITS_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    waits_s: _containers.RepeatedScalarFieldContainer[float]
    own_s: _containers.RepeatedScalarFieldContainer[float]
    own_mean_s: _containers.RepeatedScalarFieldContainer[float]
    num_rows: float
    num_tokens: float
    num_context_tokens: float
    first_waits_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, number: _Optional[int] = ..., waits_s: _Optional[_Iterable[float]] = ..., own_s: _Optional[_Iterable[float]] = ..., own_mean_s: _Optional[_Iterable[float]] = ..., num_rows: _Optional[float] = ..., num_tokens: _Optional[float] = ..., num_context_tokens: _Optional[float] = ..., first_waits_s: _Optional[_Iterable[float]] = ...) -> None: ...

class RankPicture(_message.Message):
    __slots__ = ("instance", "num_ranks", "step_s", "wait_shares", "findings")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_SHARES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    num_ranks: int
    step_s: float
    wait_shares: _containers.RepeatedScalarFieldContainer[float]
    findings: _containers.RepeatedCompositeFieldContainer[RankFinding]
    def __init__(self, instance: _Optional[str] = ..., num_ranks: _Optional[int] = ..., step_s: _Optional[float] = ..., wait_shares: _Optional[_Iterable[float]] = ..., findings: _Optional[_Iterable[_Union[RankFinding, _Mapping]]] = ...) -> None: ...

class RankFinding(_message.Message):
    __slots__ = ("kind", "rank", "source", "ratio", "share", "confidence", "evidence")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    rank: int
    source: int
    ratio: float
    share: float
    confidence: float
    evidence: _containers.ScalarMap[str, float]
    def __init__(self, kind: _Optional[str] = ..., rank: _Optional[int] = ..., source: _Optional[int] = ..., ratio: _Optional[float] = ..., share: _Optional[float] = ..., confidence: _Optional[float] = ..., evidence: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TierTokens(_message.Message):
    __slots__ = ("order", "share", "num_tokens")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    order: int
    share: float
    num_tokens: int
    def __init__(self, order: _Optional[int] = ..., share: _Optional[float] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PeerBytes(_message.Message):
    __slots__ = ("peer", "num_bytes", "seconds")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    num_bytes: int
    seconds: float
    def __init__(self, peer: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker", "load", "wire")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRecord
    load: WorkerLoad
    wire: _common_pb2.Wire
    def __init__(self, worker: _Optional[_Union[WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., wire: _Optional[_Union[_common_pb2.Wire, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ttl_s", "error", "superseded", "wire")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_ttl_s: float
    error: _common_pb2.Error
    superseded: bool
    wire: _common_pb2.Wire
    def __init__(self, lease_id: _Optional[str] = ..., lease_ttl_s: _Optional[float] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., superseded: bool = ..., wire: _Optional[_Union[_common_pb2.Wire, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "load", "draining", "num_routers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    load: WorkerLoad
    draining: bool
    num_routers: int
    def __init__(self, lease_id: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., draining: bool = ..., num_routers: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("watcher",)
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    watcher: str
    def __init__(self, watcher: _Optional[str] = ...) -> None: ...

class PoolMember(_message.Message):
    __slots__ = ("worker", "load")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRecord
    load: WorkerLoad
    def __init__(self, worker: _Optional[_Union[WorkerRecord, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class PoolSnapshot(_message.Message):
    __slots__ = ("version", "members", "departures", "ranks", "refused")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    DEPARTURES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[PoolMember]
    departures: _containers.RepeatedCompositeFieldContainer[Departure]
    ranks: _containers.RepeatedCompositeFieldContainer[RankPicture]
    refused: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[PoolMember, _Mapping]]] = ..., departures: _Optional[_Iterable[_Union[Departure, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[RankPicture, _Mapping]]] = ..., refused: _Optional[_Iterable[str]] = ...) -> None: ...

class Departure(_message.Message):
    __slots__ = ("number", "identity", "reason")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    number: int
    identity: _common_pb2.WorkerIdentity
    reason: DepartureReason
    def __init__(self, number: _Optional[int] = ..., identity: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., reason: _Optional[_Union[DepartureReason, str]] = ...) -> None: ...
