from runtime.pb import common_pb2 as _common_pb2
from runtime.pb import registry_pb2 as _registry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TicketOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TICKET_OUTCOME_UNSPECIFIED: _ClassVar[TicketOutcome]
    TICKET_OUTCOME_SENT: _ClassVar[TicketOutcome]
    TICKET_OUTCOME_NOT_NEEDED: _ClassVar[TicketOutcome]
    TICKET_OUTCOME_ABANDONED: _ClassVar[TicketOutcome]
    TICKET_OUTCOME_FAILED: _ClassVar[TicketOutcome]
TICKET_OUTCOME_UNSPECIFIED: TicketOutcome
TICKET_OUTCOME_SENT: TicketOutcome
TICKET_OUTCOME_NOT_NEEDED: TicketOutcome
TICKET_OUTCOME_ABANDONED: TicketOutcome
TICKET_OUTCOME_FAILED: TicketOutcome

class PeerEndpoint(_message.Message):
    __slots__ = ("decode", "transport", "endpoint", "kv_region_bytes", "metadata_region_bytes", "metadata_slot_bytes", "fence_generation", "wire")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KV_REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FENCE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    decode: _common_pb2.WorkerIdentity
    transport: str
    endpoint: bytes
    kv_region_bytes: int
    metadata_region_bytes: int
    metadata_slot_bytes: int
    fence_generation: int
    wire: _common_pb2.Wire
    def __init__(self, decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., transport: _Optional[str] = ..., endpoint: _Optional[bytes] = ..., kv_region_bytes: _Optional[int] = ..., metadata_region_bytes: _Optional[int] = ..., metadata_slot_bytes: _Optional[int] = ..., fence_generation: _Optional[int] = ..., wire: _Optional[_Union[_common_pb2.Wire, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "router_id", "context_token_ids", "num_output_tokens", "sampling", "timeout_s", "prefill", "prefill_address", "num_prefill_ranks", "cache_salt", "standing", "row_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ROW_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    context_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_output_tokens: int
    sampling: _common_pb2.SamplingParams
    timeout_s: float
    prefill: _common_pb2.WorkerIdentity
    prefill_address: str
    num_prefill_ranks: int
    cache_salt: str
    standing: _common_pb2.Standing
    row_id: int
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., context_token_ids: _Optional[_Iterable[int]] = ..., num_output_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., timeout_s: _Optional[float] = ..., prefill: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., prefill_address: _Optional[str] = ..., num_prefill_ranks: _Optional[int] = ..., cache_salt: _Optional[str] = ..., standing: _Optional[_Union[_common_pb2.Standing, _Mapping]] = ..., row_id: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation", "error")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    error: _common_pb2.Error
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("request_id", "decode", "decode_address", "nonce")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: _common_pb2.WorkerIdentity
    decode_address: str
    nonce: int
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., decode_address: _Optional[str] = ..., nonce: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("request_id", "nonce", "decode", "prefill", "num_prefill_ranks", "transport", "layout_fingerprint", "layout_description", "metadata_slot_bytes", "has_endpoint", "fence_generation", "wire")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_RANKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FENCE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    nonce: int
    decode: _common_pb2.WorkerIdentity
    prefill: _common_pb2.WorkerIdentity
    num_prefill_ranks: int
    transport: str
    layout_fingerprint: str
    layout_description: str
    metadata_slot_bytes: int
    has_endpoint: bool
    fence_generation: int
    wire: _common_pb2.Wire
    def __init__(self, request_id: _Optional[str] = ..., nonce: _Optional[int] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., prefill: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., num_prefill_ranks: _Optional[int] = ..., transport: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., layout_description: _Optional[str] = ..., metadata_slot_bytes: _Optional[int] = ..., has_endpoint: bool = ..., fence_generation: _Optional[int] = ..., wire: _Optional[_Union[_common_pb2.Wire, _Mapping]] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("ticket", "error", "endpoint")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ticket: TransferTicket
    error: _common_pb2.Error
    endpoint: PeerEndpoint
    def __init__(self, ticket: _Optional[_Union[TransferTicket, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., endpoint: _Optional[_Union[PeerEndpoint, _Mapping]] = ...) -> None: ...

class TransferTicket(_message.Message):
    __slots__ = ("request_id", "decode", "nonce", "num_cached_tokens", "block_ids", "metadata_slot", "timeout_s", "fence_generation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    METADATA_SLOT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    FENCE_GENERATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: _common_pb2.WorkerIdentity
    nonce: int
    num_cached_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    metadata_slot: int
    timeout_s: float
    fence_generation: int
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., nonce: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., metadata_slot: _Optional[int] = ..., timeout_s: _Optional[float] = ..., fence_generation: _Optional[int] = ...) -> None: ...

class RenewTicketsRequest(_message.Message):
    __slots__ = ("prefill", "decode_epoch", "nonces")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCES_FIELD_NUMBER: _ClassVar[int]
    prefill: _common_pb2.WorkerIdentity
    decode_epoch: int
    nonces: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prefill: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., decode_epoch: _Optional[int] = ..., nonces: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewTicketsResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unknown: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseTicketsRequest(_message.Message):
    __slots__ = ("prefill", "decode_epoch", "closures")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CLOSURES_FIELD_NUMBER: _ClassVar[int]
    prefill: _common_pb2.WorkerIdentity
    decode_epoch: int
    closures: _containers.RepeatedCompositeFieldContainer[TicketClosure]
    def __init__(self, prefill: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., decode_epoch: _Optional[int] = ..., closures: _Optional[_Iterable[_Union[TicketClosure, _Mapping]]] = ...) -> None: ...

class TicketClosure(_message.Message):
    __slots__ = ("request_id", "nonce", "parts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    nonce: int
    parts: _containers.RepeatedCompositeFieldContainer[PartClosure]
    def __init__(self, request_id: _Optional[str] = ..., nonce: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartClosure, _Mapping]]] = ...) -> None: ...

class PartClosure(_message.Message):
    __slots__ = ("rank", "outcome", "error", "timings", "num_bytes", "drained")
    RANK_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    outcome: TicketOutcome
    error: _common_pb2.Error
    timings: _common_pb2.Timings
    num_bytes: int
    drained: bool
    def __init__(self, rank: _Optional[int] = ..., outcome: _Optional[_Union[TicketOutcome, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., num_bytes: _Optional[int] = ..., drained: bool = ...) -> None: ...

class CloseTicketsResponse(_message.Message):
    __slots__ = ("error", "unknown")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.Error
    unknown: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., unknown: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "reason", "only_without_ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ONLY_WITHOUT_TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    only_without_ticket: bool
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., only_without_ticket: bool = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: bool = ...) -> None: ...

class FramesRequest(_message.Message):
    __slots__ = ("router_id", "resume")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    resume: _containers.RepeatedCompositeFieldContainer[ResumePoint]
    def __init__(self, router_id: _Optional[str] = ..., resume: _Optional[_Iterable[_Union[ResumePoint, _Mapping]]] = ...) -> None: ...

class ResumePoint(_message.Message):
    __slots__ = ("request_id", "next_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    next_index: int
    def __init__(self, request_id: _Optional[str] = ..., next_index: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("decode", "deltas", "load", "rows")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    decode: _common_pb2.WorkerIdentity
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    load: _registry_pb2.WorkerLoad
    rows: TokenRows
    def __init__(self, decode: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ..., load: _Optional[_Union[_registry_pb2.WorkerLoad, _Mapping]] = ..., rows: _Optional[_Union[TokenRows, _Mapping]] = ...) -> None: ...

class TokenRows(_message.Message):
    __slots__ = ("row_ids", "start_indexes", "num_tokens", "token_ids", "num_drafts")
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    START_INDEXES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    row_ids: _containers.RepeatedScalarFieldContainer[int]
    start_indexes: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_drafts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, row_ids: _Optional[_Iterable[int]] = ..., start_indexes: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_drafts: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request_id", "start_index", "token_ids", "logprobs", "finish_reason", "error", "timings", "num_cached_tokens", "num_drafts")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    start_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish_reason: _common_pb2.FinishReason
    error: _common_pb2.Error
    timings: _common_pb2.Timings
    num_cached_tokens: int
    num_drafts: int
    def __init__(self, request_id: _Optional[str] = ..., start_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., num_drafts: _Optional[int] = ...) -> None: ...
