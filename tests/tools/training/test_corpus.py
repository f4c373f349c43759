"""Which files become the corpus, in which order, and that nothing else decides it."""

from pathlib import Path

import pytest

from tools.training.corpus import Document, build_corpus, digest

pytestmark = pytest.mark.nightly

CODE = "def add(a, b):\n    return a + b\n\n\nclass Empty:\n    pass\n"


def _library(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


FILES = {
    "os.py": CODE.encode(),
    "json/decoder.py": CODE.encode() + b"# decoder\r\n",
    "test/test_os.py": CODE.encode() + b"# test\n",
    "pydoc_data/topics.py": b"topics = {'assert': 'The assert statement.', 'break': 'Stop.'}\n",
}


def test_order_and_digest_do_not_depend_on_the_file_system(tmp_path: Path) -> None:
    first = build_corpus(_library(tmp_path / "a", FILES))
    second = build_corpus(_library(tmp_path / "b", dict(reversed(FILES.items()))))
    assert first == second
    assert digest(first) == digest(second)
    names = [document.name for document in first]
    assert names == sorted(names)
    assert names == ["json/decoder.py", "os.py", "test/test_os.py", "topic/assert", "topic/break"]
    assert "\r" not in first[0].text


def test_digest_sees_names_texts_and_their_border() -> None:
    documents = [Document(name="a", text="xy")]
    assert digest(documents) != digest([Document(name="ax", text="y")])
    assert digest(documents) != digest([Document(name="a", text="xz")])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("site-packages/numpy.py", CODE.encode()),
        ("encodings/cp437.py", CODE.encode()),
        ("_sysconfigdata__linux.py", CODE.encode()),
        ("latin.py", CODE.encode() + b"# caf\xe9\n"),
        ("table.py", b"TABLE = [" + b"1, 22, 333,\n" * 400 + b"]\n"),
        ("line.py", b"x = '" + b"abc " * 500 + b"'\n"),
        ("empty.py", b""),
    ],
)
def test_tables_and_foreign_files_are_left_out(tmp_path: Path, name: str, content: bytes) -> None:
    documents = build_corpus(_library(tmp_path, {**FILES, name: content}))
    assert name not in {document.name for document in documents}


def test_a_folder_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"point at the folder of os\.py"):
        build_corpus(tmp_path)


def test_the_held_out_split_depends_on_the_name_alone() -> None:
    names = [f"module_{index}.py" for index in range(1000)]
    split = [Document(name=name, text="a").held_out for name in names]
    assert split == [Document(name=name, text="b").held_out for name in names]
    assert 20 <= sum(split) <= 60
