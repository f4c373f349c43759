"""Certificates that a run makes for itself, and checks of those that it is given."""

from __future__ import annotations

import dataclasses
import datetime
import stat
from pathlib import Path

import pytest

from deploy import certificates
from deploy.certificates import (
    Authority,
    KeyRequest,
    addresses_of,
    authority_of,
    check_certificate,
    make_certificates,
    with_certificates,
)
from runtime.config import ClusterConfig, ClusterSection, RouterSection, TlsSection
from runtime.errors import ConfigError
from runtime.net.credentials import Credentials, TlsFiles


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


def files_of(folder: Path, made: KeyRequest, authority: Authority, *addresses: str) -> TlsFiles:
    """What a process has that made its key itself."""
    folder.mkdir()
    texts = {
        "cert": authority.sign(made.request, addresses),
        "key": made.key,
        "ca": authority.pem,
    }
    for name, text in texts.items():
        (folder / f"{name}.pem").write_text(text)
    paths = {name: str(folder / f"{name}.pem") for name in texts}
    return TlsFiles(**paths)


def test_a_process_that_makes_its_key_is_believed_at_its_address(tmp_path: Path) -> None:
    authority = Authority.make()
    first = files_of(tmp_path / "1", KeyRequest.make(("host-1",)), authority, "10.0.0.1")
    other = files_of(tmp_path / "2", KeyRequest.make(), authority, "10.0.0.2")
    check_certificate(first, ("10.0.0.1", "host-1"))
    Credentials(secret="s", tls=first).check_certificate("10.0.0.1")
    check_certificate(dataclasses.replace(first, ca=other.ca), ("10.0.0.1",))
    with pytest.raises(ConfigError, match=r"not for 10\.0\.0\.1"):
        check_certificate(other, ("10.0.0.1",))


def test_a_request_does_not_hold_the_key() -> None:
    made = KeyRequest.make(("host-1",))
    assert "PRIVATE KEY" in made.key
    assert "PRIVATE" not in made.request
    assert made.key not in repr(made)


def spanning(**cluster: str) -> ClusterConfig:
    section = ClusterSection(host="10.0.0.5", ray_address="10.0.0.5:6379", **cluster)  # type: ignore[arg-type]
    return ClusterConfig(cluster=section, tls=TlsSection(mode="auto"))


def test_a_later_controller_signs_with_the_same_authority(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    config = spanning(on_controller_loss="keep")
    first = authority_of(config, folder)
    running = with_certificates(config, folder, first)
    later = authority_of(running, folder)
    assert first is not None
    assert later is not None
    made = KeyRequest.make()
    signed = files_of(tmp_path / "new", made, later, "10.0.0.6")
    check_certificate(dataclasses.replace(signed, ca=running.tls.ca), ("10.0.0.6",))
    assert stat.S_IMODE((folder / "ca-key.pem").stat().st_mode) == 0o600


def test_the_authority_is_kept_for_a_later_controller_only(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    running = with_certificates(spanning(), folder, authority_of(spanning(), folder))
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert authority_of(running, folder) is None


def test_nobody_signs_where_the_files_are_somebody_s(tmp_path: Path) -> None:
    Authority.make().save(tmp_path / "tls")
    others = make_certificates(tmp_path / "others", ("10.0.0.5",))
    tls = TlsSection(mode="files", cert=others.cert, key=others.key, ca=others.ca)
    assert authority_of(ClusterConfig(tls=tls), tmp_path / "tls") is None
    assert authority_of(ClusterConfig(), tmp_path / "tls") is None


def test_a_key_of_another_authority_is_refused(tmp_path: Path) -> None:
    Authority.make().save(tmp_path)
    Authority.make().save(tmp_path / "other")
    (tmp_path / "other" / "ca.pem").replace(tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=r"is not the key of ca\.pem"):
        Authority.read(tmp_path)
    (tmp_path / "ca.pem").write_text("none")
    with pytest.raises(ConfigError, match="cannot be used"):
        Authority.read(tmp_path)
