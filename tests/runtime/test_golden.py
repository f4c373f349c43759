"""What processes say to each other is what golden.txt has; what changes takes a new wire number."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.version import WIRE
from tests.runtime import golden
from tests.runtime.golden_frames import frames

GOLDEN = golden.read(golden.FILE.read_text())
NUMBER = "message tandem.v1.Wire"


def test_everything_is_said_as_golden_txt_has_it() -> None:
    assert golden.problems(GOLDEN, golden.spoken()) == []
    assert golden.written(GOLDEN) == golden.FILE.read_text()


def test_every_proto_file_is_looked_at() -> None:
    folder = Path(__file__).parents[2] / "proto"
    files = {proto.name.rpartition("/")[2] for proto in golden.PROTOS}
    assert files == {file.name for file in folder.glob("*.proto")}


def test_the_bytes_of_golden_txt_are_read_as_what_was_said() -> None:
    for name, sample in golden.samples().items():
        data = bytes.fromhex(GOLDEN[f"message {name}"])
        message = type(sample).FromString(data)
        assert message == sample, name
        assert message.SerializeToString(deterministic=True) == data, name
    for name, frame in frames().items():
        assert frame.read(bytes.fromhex(GOLDEN[f"frame {name}"])) == frame.value, name


def test_every_field_of_every_message_is_set() -> None:
    for name, of_class in golden.message_classes().items():
        fields = {field.name for field in of_class.DESCRIPTOR.fields}
        of_name = [
            sample for key, sample in golden.samples().items() if key.partition("/")[0] == name
        ]
        seen = {field.name for sample in of_name for field, _ in sample.ListFields()}
        assert seen == fields, name


@pytest.mark.parametrize(
    ("name", "old"),
    [
        pytest.param(NUMBER, "0881808080081a03c3a433", id="another number of a field"),
        pytest.param(NUMBER, "08ffffffffffffffffff011203c3a432", id="another type of a field"),
        pytest.param(NUMBER, "0881808080081203c3a4321a03c3a433", id="a field that went"),
        pytest.param("enum tandem.v1.Role", "0:ROLE_UNSPECIFIED 1:ROLE_BOTH", id="another value"),
        pytest.param("method tandem.v1.Prefill/Stop", "a -> b", id="a method that went"),
        pytest.param("message tandem.v1.RegisterRequest", "120c1a03c3a433", id="what is nested"),
        pytest.param("frame kv_flag", "00", id="bytes of our own"),
        pytest.param("package xgrammar", "0.1.0", id="a package whose format travels"),
    ],
)
def test_what_others_would_misread_takes_a_new_number(name: str, old: str) -> None:
    said = golden.problems({**GOLDEN, name: old}, golden.spoken())
    assert len(said) == 1
    assert said[0].startswith(f"{name}: others of wire number {WIRE} misread it. Fix: ")
    assert "let WIRE in runtime/version.py grow and run `make proto`" in said[0]
    grown = {**golden.spoken(), "wire": str(WIRE + 1)}
    assert golden.broken({**GOLDEN, name: old}, grown) == [name]
    assert not any("misread" in line for line in golden.problems({**GOLDEN, name: old}, grown))


@pytest.mark.parametrize(
    ("name", "old"),
    [
        pytest.param(NUMBER, "088180808008", id="a field"),
        pytest.param("enum tandem.v1.Role", "0:ROLE_UNSPECIFIED 1:ROLE_PREFILL", id="a value"),
        pytest.param("method tandem.v1.Prefill/Run", "", id="a method"),
        pytest.param("message tandem.v1.Wire", "", id="a message"),
    ],
)
def test_what_is_added_is_only_written_anew(name: str, old: str) -> None:
    lines = {**GOLDEN, name: old}
    if not old:
        del lines[name]
    said = golden.problems(lines, golden.spoken())
    assert said == [
        f"{name}: golden.txt does not have it so. Fix: run `make proto`; WIRE in "
        "runtime/version.py says when it has to grow"
    ]


def test_the_script_refuses_what_the_number_of_before_has_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "golden.txt"
    monkeypatch.setattr(golden, "FILE", file)
    file.write_text(golden.written({**GOLDEN, "frame kv_flag": "00"}))
    (said,) = golden.write()
    assert said.startswith("frame kv_flag: others of wire number")
    assert golden.read(file.read_text())["frame kv_flag"] == "00"
    file.write_text(golden.written({**GOLDEN, "wire": str(WIRE - 1), "frame kv_flag": "00"}))
    assert golden.write() == []
    assert golden.read(file.read_text()) == GOLDEN
