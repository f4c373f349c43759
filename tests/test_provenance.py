"""The provenance of an image: whole, of this image, and signed by who has to."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts import provenance
from scripts.provenance import ROOT, ProvenanceError, manifest_digest, verify

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile.cpu"
BUILDER = "https://ci.example.com/jobs/42"
BASE = f"python:3.12-slim@sha256:{'ab' * 32}"
ME = "me@example.com"


def layout(layer: bytes = b"a layer") -> dict[str, bytes]:
    """The files of an OCI archive of one image."""
    files: dict[str, bytes] = {}

    def put(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    manifest = {"schemaVersion": 2, "config": put(b"{}"), "layers": [put(layer)]}
    index = {"schemaVersion": 2, "manifests": [put(json.dumps(manifest).encode())]}
    return {"oci-layout": b"{}", "index.json": json.dumps(index).encode(), **files}


def pack(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def make_key(path: Path) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    return pack(tmp_path / "image.tar", layout())


@pytest.fixture
def signers(tmp_path: Path) -> Path:
    """Who may sign: the key ``key`` beside it."""
    key = make_key(tmp_path / "key").with_suffix(".pub").read_text(encoding="utf-8")
    signers = tmp_path / "allowed_signers"
    signers.write_text(f"{ME} {key}", encoding="utf-8")
    return signers


@pytest.fixture
def signed(image: Path, signers: Path) -> Path:
    """The statement of the image."""
    path = image.with_name("image.tar.provenance.json")
    said = provenance.statement(image, DOCKERFILE, builder=BUILDER, base=BASE)
    provenance.write(path, said, signers.with_name("key"))
    return path


def test_a_signed_statement_names_the_image_and_what_it_was_made_of(
    image: Path, signers: Path, signed: Path
) -> None:
    said = verify(image, signed, signers=signers, identity=ME)
    (subject,) = said["subject"]
    index = json.loads(layout()["index.json"])
    assert f"sha256:{subject['digest']['sha256']}" == index["manifests"][0]["digest"]
    predicate = said["predicate"]
    assert predicate["runDetails"]["builder"]["id"] == BUILDER
    made_of = {each["name"]: each for each in predicate["buildDefinition"]["resolvedDependencies"]}
    files = ["deploy/docker/Dockerfile.cpu", "requirements/runtime.txt", "requirements/uv.txt"]
    assert list(made_of) == ["source", "base", *files]
    for name in files:
        digest = hashlib.sha256((ROOT / name).read_bytes()).hexdigest()
        assert made_of[name]["digest"] == {"sha256": digest}
    assert made_of["base"]["digest"] == {"sha256": "ab" * 32}
    assert len(made_of["source"]["digest"]["gitCommit"]) == 40


def test_a_changed_statement_is_refused(image: Path, signers: Path, signed: Path) -> None:
    signed.write_text(signed.read_text().replace("jobs/42", "jobs/43"), encoding="utf-8")
    with pytest.raises(ProvenanceError, match="ssh-keygen -Y verify"):
        verify(image, signed, signers=signers, identity=ME)


def test_another_image_is_refused(image: Path, signers: Path, signed: Path) -> None:
    pack(image, layout(b"another layer"))
    with pytest.raises(ProvenanceError, match="the statement is of sha256:"):
        verify(image, signed, signers=signers, identity=ME)


def test_another_key_or_identity_is_refused(image: Path, signers: Path, signed: Path) -> None:
    with pytest.raises(ProvenanceError, match="ssh-keygen -Y verify"):
        verify(image, signed, signers=signers, identity="you@example.com")
    said = json.loads(signed.read_text(encoding="utf-8"))
    provenance.write(signed, said, make_key(signers.with_name("other")))
    with pytest.raises(ProvenanceError, match="ssh-keygen -Y verify"):
        verify(image, signed, signers=signers, identity=ME)


def test_a_signature_for_another_purpose_is_refused(
    image: Path, signers: Path, signed: Path
) -> None:
    signed.with_name(f"{signed.name}.sig").unlink()
    command = ["ssh-keygen", "-q", "-Y", "sign", "-n", "git", "-f", str(signers.with_name("key"))]
    subprocess.run([*command, str(signed)], check=True)
    with pytest.raises(ProvenanceError, match="ssh-keygen -Y verify"):
        verify(image, signed, signers=signers, identity=ME)


@pytest.mark.parametrize("said", [{}, [], {"_type": provenance.STATEMENT_TYPE}])
def test_what_is_signed_and_no_statement_is_refused(
    image: Path, signers: Path, signed: Path, said: Any
) -> None:
    provenance.write(signed, said, signers.with_name("key"))
    with pytest.raises(ProvenanceError, match="is no statement of provenance"):
        verify(image, signed, signers=signers, identity=ME)


def without(name: str) -> dict[str, bytes]:
    return {key: content for key, content in layout().items() if not key.startswith(name)}


def layer_of(files: Mapping[str, bytes]) -> str:
    return next(name for name, content in files.items() if content == b"a layer")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (layout() | {layer_of(layout()): b"changed"}, "has another digest"),
        (without(layer_of(layout())), "it lacks sha256:"),
        (without("blobs/"), "it lacks sha256:"),
        (without("index.json"), "not enough values"),
        (layout() | {"./index.json": layout()["index.json"]}, "too many values"),
        (layout() | {"index.json": b"[" * 100_000}, "is no whole OCI archive"),
        (layout() | {"index.json": b"{}"}, "manifests"),
    ],
    ids=["changed", "no layer", "no blobs", "no index", "two indexes", "nested", "empty"],
)
def test_an_archive_that_is_not_whole_is_refused(
    files: Mapping[str, bytes], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ProvenanceError, match=problem):
        manifest_digest(pack(tmp_path / "image.tar", files))
    (tmp_path / "text.tar").write_text("no archive", encoding="utf-8")
    with pytest.raises(ProvenanceError, match="is no whole OCI archive"):
        manifest_digest(tmp_path / "text.tar")


def test_an_image_index_is_the_subject_where_there_is_one(tmp_path: Path) -> None:
    """As BuildKit writes images, with an attestation beside the image."""
    files = layout()
    inner = files["index.json"]
    digest = hashlib.sha256(inner).hexdigest()
    files |= {
        f"blobs/sha256/{digest}": inner,
        "index.json": json.dumps({"manifests": [{"digest": f"sha256:{digest}"}]}).encode(),
    }
    assert manifest_digest(pack(tmp_path / "image.tar", files)) == digest


def test_the_command_writes_and_verifies(image: Path, signers: Path) -> None:
    """Elsewhere than in the repository, with nothing installed."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", str(ROOT / "scripts" / "provenance.py"), *arguments]
        return subprocess.run(
            command, cwd=image.parent, capture_output=True, text=True, check=False
        )

    written = run(
        *("write", "image.tar", "--dockerfile", str(DOCKERFILE), "--builder", BUILDER),
        *("--key", "key"),
    )
    assert written.returncode == 0, written.stderr
    checked = run("verify", "image.tar", "--signers", signers.name, "--identity", ME)
    assert (checked.returncode, checked.stdout) == (0, written.stdout)
    assert "requirements/runtime.txt: " in checked.stdout
    pack(image, layout(b"another layer"))
    refused = run("verify", "image.tar", "--signers", signers.name, "--identity", ME)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: image.tar: is sha256:")
