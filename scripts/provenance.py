r"""Where an image comes from: an in-toto statement (SLSA provenance v1), signed with an SSH key.

::

    python scripts/provenance.py write image.tar --dockerfile deploy/docker/Dockerfile.cpu \
        --builder https://ci.example.com/jobs/42 --key ~/.ssh/id_ed25519
    python scripts/provenance.py verify image.tar --signers allowed_signers --identity me@example

The image is an OCI archive: ``docker buildx build --output type=oci,dest=image.tar``, or ``buildah
push IMAGE oci-archive:image.tar``. The statement is ``image.tar.provenance.json`` beside it, its
signature ``image.tar.provenance.json.sig``. Its subject is the digest of the manifest, by which a
registry names the image. Needs git to write, ``ssh-keygen`` to sign and to verify, nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE: Final = "tandem-provenance"
"""Of signatures: one that the key has made for something else is none here."""
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
BUILD_TYPE: Final = "urn:tandem-serve:dockerfile:1"
_MALFORMED: Final = (
    *(OSError, tarfile.TarError, ValueError, LookupError, TypeError, AttributeError),
    RecursionError,
)
_MAX_JSON_BYTES: Final = 4 * 2**20
_BLOB: Final = re.compile(r"(?:\./)?blobs/sha256/([0-9a-f]{64})")
_LOCK: Final = re.compile(r"requirements/[\w-]+\.txt")


class ProvenanceError(Exception):
    """An image, a statement or a signature is not what it has to be."""


def manifest_digest(archive: Path) -> str:
    """The digest of the manifest of an OCI archive (hexadecimal SHA-256), with all that it names.

    Raises:
        ProvenanceError: it is no OCI archive of one image, or content is missing or was changed.
    """
    try:
        with tarfile.open(archive) as tar:
            indexes, blobs = _contents(tar)
        ((named,),) = [json.loads(each)["manifests"] for each in indexes]
        _check_whole(named["digest"], blobs)
    except _MALFORMED as error:
        problem = f"{archive}: is no whole OCI archive of one image: {error}"
        raise ProvenanceError(problem) from error
    return str(named["digest"]).removeprefix("sha256:")


def _contents(tar: tarfile.TarFile) -> tuple[list[bytes], dict[str, bytes]]:
    """The indexes of an archive, and by digest the beginnings of its blobs.

    Raises:
        ValueError: a blob is not what its name says.
    """
    indexes, blobs = [], {}
    for member in tar:
        file = tar.extractfile(member)
        if file is None:
            continue
        start = file.read(_MAX_JSON_BYTES)
        if member.name.removeprefix("./") == "index.json":
            indexes.append(start)
        elif blob := _BLOB.fullmatch(member.name):
            found = hashlib.sha256(start)
            while part := file.read(2**20):
                found.update(part)
            if found.hexdigest() != blob[1]:
                raise ValueError(f"{member.name} has another digest: {found.hexdigest()}")
            blobs[f"sha256:{blob[1]}"] = start
    return indexes, blobs


def _check_whole(digest: str, blobs: Mapping[str, bytes]) -> None:
    """Whether an index or a manifest is there, and all that it names.

    Raises:
        ValueError: something is missing.
    """
    if digest not in blobs:
        raise ValueError(f"it lacks {digest}")
    content = json.loads(blobs[digest])
    for manifest in content.get("manifests", ()):
        _check_whole(manifest["digest"], blobs)
    files = () if "manifests" in content else (content["config"], *content["layers"])
    missing = [each["digest"] for each in files if each["digest"] not in blobs]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")


def statement(archive: Path, dockerfile: Path, *, builder: str, base: str) -> dict[str, Any]:
    """What an image was made of.

    Args:
        archive: the image, an OCI archive
        dockerfile: below the root of the repository, whose tree it was built from
        builder: a URI that says who or what has built it
        base: the image that it was built on, with its digest; empty: that of the Dockerfile

    Raises:
        ProvenanceError: no OCI archive, or no repository.
    """
    path, text = dockerfile.resolve(), dockerfile.read_text(encoding="utf-8")
    if not path.is_relative_to(ROOT):
        raise ProvenanceError(f"{dockerfile}: is not in {ROOT}")
    base = base or (re.findall(r"^ARG BASE=(\S+)", text, re.MULTILINE) or [""])[0]
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain")
    source = {"name": "source", "digest": {"gitCommit": commit}}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": archive.name, "digest": {"sha256": manifest_digest(archive)}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"dockerfile": str(path.relative_to(ROOT))},
                "resolvedDependencies": [
                    source | ({"annotations": {"modified": True}} if changes else {}),
                    _described(base),
                    *_files(path, text),
                ],
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }


def _described(base: str) -> dict[str, Any]:
    name, _, digest = base.partition("@sha256:")
    return {"name": "base", "uri": name} | ({"digest": {"sha256": digest}} if digest else {})


def _files(dockerfile: Path, text: str) -> Iterator[dict[str, Any]]:
    """The Dockerfile, and the locks that it names."""
    for path in (dockerfile, *(ROOT / name for name in sorted(set(_LOCK.findall(text))))):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        yield {"name": str(path.relative_to(ROOT)), "digest": {"sha256": digest}}


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ProvenanceError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def write(path: Path, said: Mapping[str, Any], key: Path | None) -> None:
    """Write a statement and, with a key of SSH, its signature beside it.

    Raises:
        ProvenanceError: the key cannot sign; ssh-keygen has said why.
    """
    signature = path.with_name(f"{path.name}.sig")
    signature.unlink(missing_ok=True)
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    if key:
        _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(path))


def verify(archive: Path, path: Path, *, signers: Path, identity: str) -> dict[str, Any]:
    """The statement of an image, which a signer has signed and which is of this image.

    Args:
        archive: the image, an OCI archive
        path: the statement; its signature is beside it
        signers: OpenSSH's file of allowed signers, ``IDENTITY KEYTYPE KEY`` a line
        identity: who must have signed

    Raises:
        ProvenanceError: it is not so.
    """
    signature = path.with_name(f"{path.name}.sig")
    who = ("-f", str(signers), "-I", identity, "-n", NAMESPACE, "-s", str(signature))
    raw = path.read_bytes()
    _ssh_keygen("verify", *who, given=raw)
    try:
        said: dict[str, Any] = json.loads(raw)
        kind, named = (said["_type"], said["predicateType"]), said["subject"][0]["digest"]["sha256"]
    except _MALFORMED:
        kind, named = ("", ""), ""
    if kind != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise ProvenanceError(f"{path}: is no statement of provenance")
    found = manifest_digest(archive)
    if found != named:
        raise ProvenanceError(f"{archive}: is sha256:{found}, the statement is of sha256:{named}")
    return said


def _ssh_keygen(verb: str, *arguments: str, given: bytes = b"") -> None:
    done = subprocess.run(
        ["ssh-keygen", "-Y", verb, *arguments], input=given, capture_output=True, check=False
    )
    if done.returncode:
        reason = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ProvenanceError(f"ssh-keygen -Y {verb}: {reason}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    writing = verbs.add_parser("write", help="write and sign the statement of an image")
    writing.add_argument("archive", type=Path)
    writing.add_argument("--dockerfile", type=Path, required=True)
    writing.add_argument("--builder", required=True, metavar="URI", help="who or what has built it")
    writing.add_argument("--base", default="", metavar="IMAGE@sha256:...", help="--build-arg BASE")
    writing.add_argument("--key", type=Path, help="a private key of SSH; else it is not signed")
    verifying = verbs.add_parser("verify", help="check the statement of an image")
    verifying.add_argument("archive", type=Path)
    verifying.add_argument("--signers", type=Path, required=True, help="an allowed_signers file")
    verifying.add_argument("--identity", required=True, help="of the signer, in that file")
    return parser


def main() -> int:
    """Write or verify; one line on stderr for what is wrong."""
    args = _parser().parse_args()
    path = args.archive.with_name(f"{args.archive.name}.provenance.json")
    try:
        if args.verb == "write":
            said = statement(args.archive, args.dockerfile, builder=args.builder, base=args.base)
            write(path, said, args.key)
        else:
            said = verify(args.archive, path, signers=args.signers, identity=args.identity)
    except (ProvenanceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    definition = said["predicate"]["buildDefinition"]
    print(f"{path}: sha256:{said['subject'][0]['digest']['sha256']}")
    for each in definition["resolvedDependencies"]:
        (digest,) = each.get("digest", {"": "no digest"}).values()
        changed = ", with changes that are in no commit" if "annotations" in each else ""
        print(f"  {each['name']}: {digest}{changed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
