"""The script that fetches a Prometheus 3: what it takes, and how it says that it cannot."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.prometheus import find_program, why_missing

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "prometheus_3.sh"
PROGRAMS = ("prometheus", "promtool")
TRUSTED = "trusted=yes"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None,
        reason="this is no Debian",
    ),
]


class Repository:
    """A folder as apt reads it, with packages whose programs only tell their version."""

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        (folder / "Packages").write_text(
            "\n".join(self._package(name, version) for name in PROGRAMS)
        )

    def source(self, options: str = TRUSTED) -> str:
        """The line for sources.list."""
        return f"deb [{options}] copy:{self.folder} ./"

    def path(self, name: str) -> Path:
        """Of a package's file."""
        (path,) = self.folder.glob(f"{name}_*.deb")
        return path

    def _package(self, name: str, version: str) -> str:
        root = self.folder / name
        (root / "usr" / "bin").mkdir(parents=True)
        program = root / "usr" / "bin" / name
        program.write_text(f"#!/bin/sh\necho '{name}, version {version} (branch: HEAD)'\n")
        program.chmod(0o755)
        (root / "DEBIAN").mkdir()
        control = f"Package: {name}\nVersion: {version}-1\nArchitecture: all\n"
        control += "Maintainer: nobody <nobody@example.com>\nDescription: of a test\n"
        (root / "DEBIAN" / "control").write_text(control)
        built = self.folder / f"{name}_{version}-1_all.deb"
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-b", root, built], check=True, capture_output=True
        )
        content = built.read_bytes()
        sums = f"Size: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
        return f"{control}Filename: ./{built.name}\n{sums}"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "repository"
    folder.mkdir()
    return Repository(folder, "3.9.1")


def fetch(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, folder, source], capture_output=True, text=True, check=False, timeout=120
    )


def refused(folder: Path, source: str) -> str:
    """The one line that is said, which the tests that need it say, too."""
    done = fetch(folder, source)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("no Prometheus 3, its tests are skipped: ")
    assert not (folder / "prometheus").exists()
    assert line.removeprefix("no Prometheus 3, its tests are skipped: ") in why_missing(3, folder)
    return line


def test_both_programs_are_unpacked_and_found(tmp_path: Path, repository: Repository) -> None:
    folder = tmp_path / "programs"
    assert refused(folder, "deb [trusted=yes] copy:/nowhere ./")
    done = fetch(folder, repository.source())
    assert done.returncode == 0, done.stderr
    assert "Prometheus 3.9.1 is in" in done.stdout
    assert sorted(path.name for path in folder.iterdir()) == sorted(PROGRAMS)
    assert find_program("promtool", 3, folder) == folder / "promtool"
    assert find_program("promtool", 4, folder) is None


def test_what_is_there_is_not_fetched_again(tmp_path: Path, repository: Repository) -> None:
    folder = tmp_path / "programs"
    fetch(folder, repository.source())
    done = fetch(folder, "deb copy:/nowhere ./")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_package_that_is_not_the_one_of_the_index_is_refused(
    tmp_path: Path, repository: Repository
) -> None:
    content = bytearray(repository.path("promtool").read_bytes())
    content[-1] ^= 1
    repository.path("promtool").write_bytes(content)
    assert "Hash Sum mismatch" in refused(tmp_path / "programs", repository.source())


def test_an_index_that_nobody_has_signed_is_refused(tmp_path: Path, repository: Repository) -> None:
    source = repository.source("signed-by=/usr/share/keyrings/debian-archive-keyring.gpg")
    assert "does not have a Release file" in refused(tmp_path / "programs", source)


def test_a_suite_that_has_another_major_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    line = refused(tmp_path / "programs", Repository(folder, "2.53.0").source())
    assert "prometheus_2.53.0-1_all.deb is version '2.53.0'" in line


def test_a_suite_without_the_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "Packages").write_text("")
    line = refused(tmp_path / "programs", f"deb [{TRUSTED}] copy:{tmp_path} ./")
    assert "Unable to locate package prom" in line
