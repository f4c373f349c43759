"""``tandem certificates``: files that hosts can use, and an authority that goes on."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from cryptography import x509

from deploy.certificates import check_certificate
from deploy.cli import main
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, TlsFiles
from runtime.net.roles import Role


def make(folder: Path, *words: str) -> int:
    return main(["certificates", "--out", str(folder), *words])


def files_of(folder: Path) -> TlsFiles:
    return TlsFiles(**{name: str(folder / f"{name}.pem") for name in ("cert", "key", "ca")})


def test_each_host_has_files_that_the_others_believe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tls"
    assert make(out, "--hosts", "10.0.0.1,node-2", "--also", "llm.example") == 0
    for host in ("10.0.0.1", "node-2"):
        files = files_of(out / host)
        check_certificate(files, (host, "llm.example", "localhost"))
        Credentials(secret="s", tls=files).check_certificate(host)
        for path in files.paths:
            assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    told = capsys.readouterr().out
    assert f"scp -p {out}/node-2/*.pem node-2:/etc/tandem/" in told
    assert 'key = "/etc/tandem/key.pem"' in told


def test_one_of_a_role_is_no_good_to_another(tmp_path: Path) -> None:
    assert make(tmp_path, "--hosts", "10.0.0.1", "--role", "prefill", "--role", "router") == 0
    tls = files_of(tmp_path / "10.0.0.1")
    for role in (Role.PREFILL, Role.ROUTER):
        Credentials(secret="s", tls=tls, role=role).check_certificate("10.0.0.1")
    with pytest.raises(ConfigError, match=r"prefill and router: this is a decode.*--role decode"):
        Credentials(secret="s", tls=tls, role=Role.DECODE).check_certificate("10.0.0.1")


def test_a_further_host_is_of_the_same_authority(tmp_path: Path) -> None:
    assert make(tmp_path, "--hosts", "10.0.0.1") == 0
    before = (tmp_path / "ca.pem").read_bytes()
    assert make(tmp_path, "--hosts", "10.0.0.2") == 0
    assert (tmp_path / "ca.pem").read_bytes() == before
    first, other = files_of(tmp_path / "10.0.0.1"), files_of(tmp_path / "10.0.0.2")
    assert Path(first.ca).read_bytes() == Path(other.ca).read_bytes() == before


def test_they_are_good_for_as_long_as_was_said(tmp_path: Path) -> None:
    assert make(tmp_path, "--hosts", "10.0.0.1", "--days", "30") == 0
    cert = x509.load_pem_x509_certificate((tmp_path / "10.0.0.1" / "cert.pem").read_bytes())
    left = cert.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=29) < left <= datetime.timedelta(days=30)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--hosts", ""), "--hosts ''"),
        (("--hosts", "0.0.0.0"), "'0.0.0.0'"),
        (("--hosts", "../up"), "'../up'"),
        (("--hosts", "a,,b"), "--hosts ''"),
        (("--hosts", "a", "--also", "x y"), "--also 'x y'"),
        (("--hosts", "a", "--days", "0"), "--days 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(tmp_path / "tls", *words) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "Fix:" in error
    assert not (tmp_path / "tls").exists()


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert make(tmp_path / "file" / "tls", "--hosts", "a") == 2
    assert f"--out {tmp_path}/file/tls" in capsys.readouterr().err
