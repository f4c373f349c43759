from runtime.pb import common_pb2 as _common_pb2
from runtime.pb import registry_pb2 as _registry_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CacheEventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_EVENT_KIND_UNSPECIFIED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_STORED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_REMOVED: _ClassVar[CacheEventKind]
    CACHE_EVENT_KIND_CLEARED: _ClassVar[CacheEventKind]

class CacheDump(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_DUMP_UNSPECIFIED: _ClassVar[CacheDump]
    CACHE_DUMP_PIECE: _ClassVar[CacheDump]
    CACHE_DUMP_LAST: _ClassVar[CacheDump]
CACHE_EVENT_KIND_UNSPECIFIED: CacheEventKind
CACHE_EVENT_KIND_STORED: CacheEventKind
CACHE_EVENT_KIND_REMOVED: CacheEventKind
CACHE_EVENT_KIND_CLEARED: CacheEventKind
CACHE_DUMP_UNSPECIFIED: CacheDump
CACHE_DUMP_PIECE: CacheDump
CACHE_DUMP_LAST: CacheDump

class FollowRequest(_message.Message):
    __slots__ = ("router_id", "worker", "next_sequence")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    worker: _common_pb2.WorkerIdentity
    next_sequence: int
    def __init__(self, router_id: _Optional[str] = ..., worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class CacheFrame(_message.Message):
    __slots__ = ("worker", "first_sequence", "kinds", "hashes", "dump", "load")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DUMP_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker: _common_pb2.WorkerIdentity
    first_sequence: int
    kinds: bytes
    hashes: bytes
    dump: CacheDump
    load: _registry_pb2.WorkerLoad
    def __init__(self, worker: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., first_sequence: _Optional[int] = ..., kinds: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., dump: _Optional[_Union[CacheDump, str]] = ..., load: _Optional[_Union[_registry_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...
