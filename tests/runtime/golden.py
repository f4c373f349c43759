"""Everything that processes say to each other, as text: what golden.txt has of it, and what is so.

A line is a kind, a name and what is sent. Messages of ``proto/`` have all their fields set to
values that follow from number and type alone, so that another number or type gives other bytes;
of a oneof each alternative is a line. As a script it writes golden.txt anew, and refuses where
something has changed that the number before has already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from runtime.pb import (
    cache_pb2,
    calls_pb2,
    common_pb2,
    controller_pb2,
    decode_pb2,
    experts_pb2,
    keys_pb2,
    prefill_pb2,
    registry_pb2,
)
from runtime.version import WIRE
from tests.runtime.golden_frames import frames

FILE = Path(__file__).with_name("golden.txt")
PROTOS: list[FileDescriptor] = [
    cache_pb2.DESCRIPTOR,
    calls_pb2.DESCRIPTOR,
    common_pb2.DESCRIPTOR,
    controller_pb2.DESCRIPTOR,
    decode_pb2.DESCRIPTOR,
    experts_pb2.DESCRIPTOR,
    keys_pb2.DESCRIPTOR,
    prefill_pb2.DESCRIPTOR,
    registry_pb2.DESCRIPTOR,
]
TRAVELLING = ("xgrammar",)
"""Packages whose own formats are in our messages."""


def message_classes() -> dict[str, type[Message]]:
    """Those of all of ``proto/``, by full name."""
    return {
        descriptor.full_name: GetMessageClass(descriptor)
        for proto in PROTOS
        for descriptor in proto.message_types_by_name.values()
    }


def samples() -> dict[str, Message]:
    """By name; of a message with a oneof by name, "/" and the alternative."""
    found: dict[str, Message] = {}
    for name, of_class in message_classes().items():
        oneofs = of_class.DESCRIPTOR.oneofs
        choices = [field.name for oneof in oneofs for field in oneof.fields]
        for choice in choices or [""]:
            found[f"{name}/{choice}".rstrip("/")] = _fill(of_class.DESCRIPTOR, choice)
    return found


def spoken() -> dict[str, str]:
    """What this tree says, by kind and name."""
    lines = {"wire": str(WIRE)}
    lines |= {f"package {name}": metadata.version(name) for name in TRAVELLING}
    for proto in PROTOS:
        for enum in proto.enum_types_by_name.values():
            lines[f"enum {enum.full_name}"] = _values_of(enum)
        for service in proto.services_by_name.values():
            for method in service.methods:
                streams = "stream " if method.server_streaming else ""
                said = f"{method.input_type.full_name} -> {streams}{method.output_type.full_name}"
                lines[f"method {service.full_name}/{method.name}"] = said
    for name, sample in samples().items():
        lines[f"message {name}"] = sample.SerializeToString(deterministic=True).hex()
    lines |= {f"frame {name}": frame.data.hex() for name, frame in frames().items()}
    return lines


def read(text: str) -> dict[str, str]:
    """The lines of golden.txt."""
    lines = (line.partition(" = ") for line in text.splitlines())
    return {name: value for name, _, value in lines}


def written(lines: Mapping[str, str]) -> str:
    """The text of golden.txt."""
    return "".join(f"{name} = {value}\n" for name, value in lines.items())


def broken(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What has changed so that a process with ``old`` would misread one with ``new``."""
    return [
        name for name in old if name != "wire" and not _is_kept(name, old[name], new.get(name, ""))
    ]


def problems(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Why ``old``, from golden.txt, is not to be kept; each with what to do."""
    changed = broken(old, new)
    has_grown = int(new["wire"]) > int(old["wire"])
    if changed and not has_grown:
        fix = "Fix: take it back, or let WIRE in runtime/version.py grow and run `make proto`"
        return [
            f"{name}: others of wire number {old['wire']} misread it. {fix}" for name in changed
        ]
    stale = [name for name in (old | new) if old.get(name) != new.get(name)]
    fix = "Fix: run `make proto`; WIRE in runtime/version.py says when it has to grow"
    return [f"{name}: golden.txt does not have it so. {fix}" for name in stale]


def write() -> list[str]:
    """Write golden.txt; why not, where something takes a number that has grown."""
    old, new = read(FILE.read_text()), spoken()
    if broken(old, new) and int(new["wire"]) <= int(old["wire"]):
        return problems(old, new)
    FILE.write_text(written(new))
    return []


def _is_kept(name: str, old: str, new: str) -> bool:
    """Whether what was said is read as it was; more may be said."""
    kind, _, full_name = name.partition(" ")
    if kind == "enum":
        return set(old.split()) <= set(new.split())
    if kind != "message" or not new:
        return old == new
    of_class = message_classes()[full_name.partition("/")[0]]
    try:
        before = of_class.FromString(bytes.fromhex(old))
    except DecodeError:
        return False
    return _is_within(before, of_class.FromString(bytes.fromhex(new)))


def _is_within(part: Message, whole: Message) -> bool:
    """Whether each field of ``part`` is known, and in ``whole`` the same or more."""
    if len(UnknownFieldSet(part)):
        return False
    for field, value in part.ListFields():
        other = getattr(whole, field.name)
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.type != FieldDescriptor.TYPE_MESSAGE or is_map:
            if value != other:
                return False
        elif field.is_repeated:
            pairs = list(zip(value, other, strict=False))
            if len(value) != len(other) or not all(_is_within(*pair) for pair in pairs):
                return False
        elif not whole.HasField(field.name) or not _is_within(value, other):
            return False
    return True


def _fill(descriptor: Descriptor, choice: str = "") -> Message:
    """All fields of it, of a oneof ``choice`` or the first."""
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None:
            names = [other.name for other in oneof.fields]
            if field.name != (choice if choice in names else names[0]):
                continue
        _set(message, field)
    return message


def _set(message: Message, field: FieldDescriptor) -> None:
    into = getattr(message, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
        of_key, of_value = field.message_type.fields
        into[_scalar(of_key)] = _scalar(of_value)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        sample = _fill(field.message_type)
        (into.add() if field.is_repeated else into).CopyFrom(sample)
        if not field.is_repeated:
            into.SetInParent()
    elif field.is_repeated:
        into.extend([_scalar(field)] * 2)
    else:
        setattr(message, field.name, _scalar(field))


def _scalar(field: FieldDescriptor) -> object:
    """A value that no other type has the same bytes for, where any can be told apart."""
    number = field.number
    values: dict[int, object] = {
        FieldDescriptor.TYPE_BOOL: True,
        FieldDescriptor.TYPE_BYTES: b"\xff" + bytes([number]),
        FieldDescriptor.TYPE_DOUBLE: number + 0.125,
        FieldDescriptor.TYPE_FLOAT: number + 0.5,
        FieldDescriptor.TYPE_FIXED32: 2**31 + number,
        FieldDescriptor.TYPE_FIXED64: 2**63 + number,
        FieldDescriptor.TYPE_INT32: -number,
        FieldDescriptor.TYPE_INT64: -(2**40) - number,
        FieldDescriptor.TYPE_SINT32: -number,
        FieldDescriptor.TYPE_SINT64: -(2**40) - number,
        FieldDescriptor.TYPE_STRING: f"\u00e4{number}",
        FieldDescriptor.TYPE_UINT32: 2**31 + number,
        FieldDescriptor.TYPE_UINT64: 2**63 + number,
    }
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values[1].number
    return values[field.type]


def _values_of(enum: EnumDescriptor) -> str:
    return " ".join(f"{value.number}:{value.name}" for value in enum.values)


if __name__ == "__main__":
    sys.exit("\n".join(write()) or None)
