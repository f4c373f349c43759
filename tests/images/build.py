"""Builds the CPU image on this machine: ``python -m tests.images.build FOLDER``.

buildah builds ``deploy/docker/Dockerfile.cpu`` in a chroot, on a base that debootstrap makes of the
Debian that this machine has, from where apt gets it. pip's configuration of this machine holds for
the build. The folder has then what a test needs to run the image:

- ``root``: the image's file system
- ``image.json``: what the image says of itself
- ``image.tar``: the image as an OCI archive, and its provenance (``scripts/provenance.py``)
- ``storage``: buildah's own, with a container of the image by the name in ``CONTAINER``

Needs root, and Debian's packages ``buildah`` and ``debootstrap``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts import provenance

REPOSITORY = Path(__file__).resolve().parents[2]
DOCKERFILE = REPOSITORY / "deploy" / "docker" / "Dockerfile.cpu"
BASE, IMAGE, CONTAINER = "localhost/debian-python", "localhost/tandem-serve:cpu", "tandem"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
"""What the base that the Dockerfile names has beside Debian."""
CERTIFICATES = Path("/etc/ssl/certs")
CONFIGURATIONS = ("/etc/pip.conf", "/etc/xdg/pip", "/root/.config/pip", "/root/.pip")


def why_not() -> str:
    """Why no image can be built here; empty: it can."""
    if os.geteuid() != 0:
        return "needs root: buildah and debootstrap change their root"
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    return f"needs Debian's {' and '.join(missing)}" if missing else ""


def buildah(folder: Path, *arguments: str) -> list[str]:
    """A command line of buildah with the storage of this folder."""
    storage = folder / "storage"
    places = ("--root", str(storage / "root"), "--runroot", str(storage / "run"))
    return ["buildah", "--storage-driver", "vfs", *places, *arguments]


def build(folder: Path) -> None:
    """Build the image into a folder, which is made.

    Raises:
        subprocess.CalledProcessError: some step failed, and has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base.tar"
    if not base.exists():
        make_base(base)
    shutil.rmtree(folder / "storage", ignore_errors=True)
    (folder / "root").unlink(missing_ok=True)
    name = run(buildah(folder, "from", "scratch"))
    run(buildah(folder, "add", "--quiet", name, str(base), "/"))
    run(buildah(folder, "commit", "--quiet", "--rm", name, BASE))
    of_pip = [part for place in pips_places() for part in ("--volume", f"{place}:{place}:ro")]
    run(
        buildah(
            folder,
            *("bud", "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE={BASE}"),
            *of_pip,
            *("--ignorefile", f"{DOCKERFILE}.dockerignore", "--file", str(DOCKERFILE)),
            *("--tag", IMAGE, str(REPOSITORY)),
        ),
        quiet=False,
    )
    run(buildah(folder, "from", "--pull-never", "--name", CONTAINER, IMAGE))
    config = json.loads(run(buildah(folder, "inspect", "--type", "image", IMAGE)))
    (folder / "image.json").write_text(json.dumps(config["OCIv1"]["config"]))
    (folder / "root").symlink_to(run(buildah(folder, "mount", CONTAINER)))
    write_provenance(folder, base)


def write_provenance(folder: Path, base: Path) -> None:
    """Write the image as an archive, and what it was made of; unsigned: the key is a user's."""
    archive = folder / "image.tar"
    archive.unlink(missing_ok=True)
    run(
        buildah(folder, "push", "--quiet", "--disable-compression", IMAGE, f"oci-archive:{archive}")
    )
    with base.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    said = provenance.statement(
        archive, DOCKERFILE, builder="urn:buildah", base=f"{BASE}@sha256:{digest}"
    )
    provenance.write(folder / "image.tar.provenance.json", said, key=None)


def make_base(archive: Path) -> None:
    """Make an archive of this machine's Debian with Python, and of nothing else."""
    mirror, suite = apts_source()
    with tempfile.TemporaryDirectory(dir=archive.parent) as root:
        include = f"--include={','.join(PACKAGES)}"
        command = ["debootstrap", "--variant=minbase", include, suite, root, mirror]
        run(command, quiet=False)
        part = archive.with_suffix(".part")
        leave = ("--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*")
        run(["tar", "--create", "--file", str(part), "--directory", root, *leave, "."])
    part.rename(archive)


def apts_source() -> tuple[str, str]:
    """Where apt gets Debian itself from: the address and the name of the release."""
    form = ("--format", "$(REPO_URI) $(CODENAME) $(SUITE)")
    chosen = ("Created-By: Packages", "Component: main")
    lines = run(["apt-get", "indextargets", *form, *chosen]).splitlines()
    for line in lines:
        address, codename, suite = line.split()
        if not any(part in f"{codename} {suite}" for part in ("-updates", "-security")):
            return address, codename
    raise SystemExit(
        "error: apt knows no Debian. Fix: apt-get update, or a source of Debian's main"
    )


def pips_places() -> Iterator[Path]:
    """Files and folders of this machine that pip reads: the build is to read them as well."""
    yield CERTIFICATES
    yield from (Path(one) for one in CONFIGURATIONS if Path(one).exists())
    # The environment of the tests has no pip; this one installs it.
    python = REPOSITORY / ".venv-uv" / "bin" / "python"
    options = run([str(python), "-m", "pip", "config", "list"])
    words = options.replace("'", " ").replace("=", " ").replace("file://", "").split()
    folders = {Path(word) for word in words if word.startswith("/") and Path(word).is_dir()}
    # An index is beside what it names.
    folders = {one.parent if one.name == "simple" else one for one in folders}
    yield from sorted(one for one in folders if one != CERTIFICATES)


def run(command: Sequence[str], *, quiet: bool = True) -> str:
    """What a command said."""
    print("+", *command, flush=True)
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, check=True, stdout=output, text=True)
    return (done.stdout or "").strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    reason = why_not()
    if reason:
        raise SystemExit(f"error: {reason}")
    build(parser.parse_args().folder.resolve())
