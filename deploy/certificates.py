"""Certificates: made for one run of a cluster, or looked at before somebody else's are used.

With ``tls.mode = "auto"`` an authority is made for the run, signs one certificate for every address
of this machine at which processes call each other, and is forgotten: its key is never written. The
files are private to the user and go with the run. The only file that imports ``cryptography``.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import socket
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.net import TlsFiles, is_wildcard

_LIFE = datetime.timedelta(days=3650)
"""Longer than a run: it would end in the middle of service."""
_CLOCK_SKEW = datetime.timedelta(hours=1)


def with_certificates(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """``config`` with files made in ``folder`` where it asks for "auto", else as it is."""
    if config.tls.mode != "auto":
        return config
    made = make_certificates(folder, addresses_of(config))
    tls = dataclasses.replace(config.tls, mode="files", cert=made.cert, key=made.key, ca=made.ca)
    return dataclasses.replace(config, tls=tls)


def addresses_of(config: ClusterConfig) -> tuple[str, ...]:
    """The names and addresses at which this machine's processes are called."""
    named = (config.cluster.host, config.cluster.reach, config.http_host, config.http_reach)
    own = ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())
    return tuple(dict.fromkeys(one for one in (*named, *own) if not is_wildcard(one)))


def make_certificates(folder: Path, addresses: tuple[str, ...]) -> TlsFiles:
    """Write ``cert.pem``, ``key.pem`` and ``ca.pem`` below ``folder``.

    The certificate serves both ends of a connection at all of ``addresses``.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = _signed("tandem run authority", ca_key, None, ca_key)
    cert = _signed("tandem", key, ca, ca_key, addresses)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem = serialization.Encoding.PEM
    contents = {"cert": cert.public_bytes(pem), "key": private, "ca": ca.public_bytes(pem)}
    paths = {name: _write(folder / f"{name}.pem", data) for name, data in contents.items()}
    return TlsFiles(cert=paths["cert"], key=paths["key"], ca=paths["ca"])


def check_certificate(files: TlsFiles, addresses: tuple[str, ...]) -> None:
    """Refuse files that no peer would believe.

    Raises:
        ConfigError: a file cannot be used, the certificate is for none of ``addresses``, not of
            ``tls.ca``, or not valid now.
    """
    pem = files.read()
    cert = x509.load_pem_x509_certificate(pem.cert)
    now = datetime.datetime.now(datetime.UTC)
    if not cert.not_valid_before_utc <= now <= cert.not_valid_after_utc:
        problem = f"is valid from {cert.not_valid_before_utc} to {cert.not_valid_after_utc} only"
        raise ConfigError("tls.cert", files.cert, problem, "a certificate that is valid now")
    _check_authority(files, cert, x509.load_pem_x509_certificates(pem.ca))
    names = _names_of(cert)
    for address in addresses:
        if not any(_matches(name, address) for name in names):
            problem = f"is for {', '.join(names) or 'no name or address'}, not for {address}"
            fix = f"a certificate whose subjectAltName has {address}"
            raise ConfigError("tls.cert", files.cert, problem, fix)


def _check_authority(
    files: TlsFiles, cert: x509.Certificate, authorities: list[x509.Certificate]
) -> None:
    """Only where the file of the certificate holds no others between it and the authority."""
    between = len(x509.load_pem_x509_certificates(Path(files.cert).read_bytes())) > 1
    if between or any(_is_issuer(one, cert) for one in authorities):
        return
    problem = f"was signed by another authority than tls.ca = {files.ca!r}"
    raise ConfigError("tls.cert", files.cert, problem, "the authority that signed it as tls.ca")


def _is_issuer(authority: x509.Certificate, cert: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _signed(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    addresses: tuple[str, ...] = (),
) -> x509.Certificate:
    """A certificate for ``addresses``; an authority's own where there is no ``issuer``."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer is None:
        builder = builder.add_extension(_AUTHORITY_USAGE, critical=True)
    else:
        parent = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            builder.add_extension(parent, critical=False)
            .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(one) for one in addresses]),
                critical=False,
            )
        )
    return builder.sign(issuer_key, hashes.SHA256())


_AUTHORITY_USAGE = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _names_of(cert: x509.Certificate) -> list[str]:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def _matches(name: str, address: str) -> bool:
    if name.startswith("*."):
        return address.partition(".")[2].lower() == name[2:].lower()
    return name.lower() == address.lower()


def _write(path: Path, data: bytes) -> str:
    # Remains of a run that died may be there, with another mode.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return str(path)
