"""Certificates that a run makes for itself, and checks of those that it is given."""

from __future__ import annotations

import dataclasses
import datetime
import stat
from pathlib import Path

import pytest

from deploy import certificates
from deploy.certificates import (
    addresses_of,
    check_certificate,
    make_certificates,
    with_certificates,
)
from runtime.config import ClusterConfig, ClusterSection, RouterSection, TlsSection
from runtime.errors import ConfigError


def test_files_are_private_and_for_every_address_at_which_we_are_called(tmp_path: Path) -> None:
    config = ClusterConfig(
        cluster=ClusterSection(host="0.0.0.0", advertise="node-1.example"),
        router=RouterSection(host="10.0.0.5"),
        tls=TlsSection(mode="auto", mutual=False),
    )
    made = with_certificates(config, tmp_path / "tls")
    assert (made.tls.mode, made.tls.mutual) == ("files", False)
    assert made.tls.files is not None
    check_certificate(made.tls.files, ("node-1.example", "10.0.0.5", "127.0.0.1", "localhost"))
    assert "0.0.0.0" not in addresses_of(config)
    for path in (tmp_path / "tls").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700


def test_the_key_of_the_authority_is_not_kept(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", ("127.0.0.1",))
    keys = [path.name for path in (tmp_path / "tls").iterdir() if b"KEY" in path.read_bytes()]
    assert keys == ["key.pem"]


def test_remains_of_a_dead_run_are_replaced(tmp_path: Path) -> None:
    first = make_certificates(tmp_path / "tls", ("127.0.0.1",)).read()
    assert make_certificates(tmp_path / "tls", ("127.0.0.1",)).read() != first


def test_nothing_is_made_unless_asked_for(tmp_path: Path) -> None:
    config = ClusterConfig()
    assert with_certificates(config, tmp_path / "tls") is config
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_for_others_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls", ("10.0.0.5", "*.cluster.example"))
    check_certificate(made, ("10.0.0.5", "node-1.cluster.example"))
    for address in ("10.0.0.6", "a.node-1.cluster.example", "cluster.example"):
        with pytest.raises(ConfigError, match="subjectAltName") as caught:
            check_certificate(made, (address,))
        assert caught.value.path == "tls.cert"


def test_a_certificate_of_yesterday_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "_LIFE", datetime.timedelta(minutes=-1))
    made = make_certificates(tmp_path / "tls", ("127.0.0.1",))
    with pytest.raises(ConfigError, match="is valid from"):
        check_certificate(made, ("127.0.0.1",))


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls", ("127.0.0.1",))
    other = make_certificates(tmp_path / "others", ("127.0.0.1",))
    with pytest.raises(ConfigError, match="another authority"):
        check_certificate(dataclasses.replace(made, ca=other.ca), ("127.0.0.1",))
