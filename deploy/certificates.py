"""Certificates: made for one run of a cluster, or looked at before somebody else's are used.

With ``tls.mode = "auto"`` an authority is made for the run. It signs one certificate for every
address of this machine at which processes call each other. On several hosts it signs one for each
process: keys are made where they are used, and only requests and certificates travel. The
authority's key stays in the controller, unless another one may have to go on with it. The files are
private to the user and go with the run. The only file that imports ``cryptography``.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.net.credentials import TlsFiles, is_wildcard
from runtime.net.roles import URI, Role

_LIFE = datetime.timedelta(days=3650)
"""Longer than a run: it would end in the middle of service."""
_CLOCK_SKEW = datetime.timedelta(hours=1)
_AUTHORITY_KEY = "ca-key.pem"


class Authority:
    """Signs certificates for the processes of one cluster."""

    def __init__(self, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        """``make`` or ``read`` has both."""
        self._cert, self._key = cert, key

    @classmethod
    def make(cls) -> Authority:
        """A new one."""
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(_signed("tandem authority", key.public_key(), None, key), key)

    @classmethod
    def read(cls, folder: Path) -> Authority | None:
        """The one that ``save`` has left in ``folder``; None: none has.

        Raises:
            ConfigError: what is there is no authority.
        """
        path = folder / _AUTHORITY_KEY
        if not path.exists():
            return None
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
            cert = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            fix = "another folder, or one that Tandem has written"
            raise ConfigError(_AUTHORITY_KEY, str(path), f"cannot be used ({error})", fix) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            fix = "the two files that were written together"
            raise ConfigError(_AUTHORITY_KEY, str(path), "is not the key of ca.pem", fix)
        return cls(cert, key)

    def save(self, folder: Path) -> None:
        """Have ``read`` find it: whoever reads this file can be any process of the cluster."""
        folder.mkdir(mode=0o700, exist_ok=True)
        _write(folder / _AUTHORITY_KEY, _private_pem(self._key))
        _write(folder / "ca.pem", self.pem.encode())

    @property
    def pem(self) -> str:
        """Its own certificate."""
        return self._cert.public_bytes(serialization.Encoding.PEM).decode()

    def sign(
        self,
        request: str,
        addresses: tuple[str, ...],
        *,
        life: datetime.timedelta | None = None,
        roles: tuple[Role, ...] = (),
    ) -> str:
        """The certificate of a ``KeyRequest``, for ``addresses`` and the names that it asks for.

        It is good for processes of ``roles``; of all where there are none. No request asks for one.
        """
        asked = x509.load_pem_x509_csr(request.encode())
        names = tuple(dict.fromkeys((*addresses, *_names_of(asked))))
        public = asked.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        uris = tuple(f"{URI}{role}" for role in roles)
        signed = _signed(
            *("tandem", public, self._cert, self._key), addresses=names, uris=uris, life=life
        )
        return signed.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRequest:
    """A new key, and the request for a certificate of it, both PEM."""

    key: str = field(repr=False)
    """Stays where it was made."""
    request: str

    @classmethod
    def make(cls, names: tuple[str, ...] = ()) -> KeyRequest:
        """Asks for ``names``, beside the addresses that the authority knows by itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = x509.CertificateSigningRequestBuilder().subject_name(_subject("tandem"))
        if names:
            asked = x509.SubjectAlternativeName([_general_name(name) for name in names])
            builder = builder.add_extension(asked, critical=False)
        request = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return cls(key=_private_pem(key).decode(), request=request.decode())


def authority_of(config: ClusterConfig, folder: Path) -> Authority | None:
    """Who signs for this run: a new one with "auto"; that of the controller before, whose
    certificates in ``folder`` are in use; None where somebody else has signed.
    """
    if config.tls.mode == "auto":
        made = Authority.make()
        if config.cluster.spans_hosts and config.cluster.on_controller_loss == "keep":
            made.save(folder)
        return made
    is_ours = config.tls.mode == "files" and Path(config.tls.ca).parent == folder
    return Authority.read(folder) if is_ours else None


def with_certificates(
    config: ClusterConfig, folder: Path, authority: Authority | None = None
) -> ClusterConfig:
    """``config`` with files made in ``folder`` where it asks for "auto", else as it is."""
    if config.tls.mode != "auto":
        return config
    # On one machine all processes read these files; on several each has a certificate of its own.
    roles = (Role.CONTROLLER,) if config.cluster.spans_hosts else ()
    names = (*addresses_of(config), *own_names())
    made = make_certificates(folder, names, authority, roles=roles)
    tls = dataclasses.replace(config.tls, mode="files", cert=made.cert, key=made.key, ca=made.ca)
    return dataclasses.replace(config, tls=tls)


def addresses_of(config: ClusterConfig) -> tuple[str, ...]:
    """The addresses at which processes that read ``config`` are called."""
    named = (config.cluster.host, config.cluster.reach, config.http_host, config.http_reach)
    return tuple(dict.fromkeys(one for one in named if not is_wildcard(one)))


def own_names() -> tuple[str, ...]:
    """The names by which this machine is called besides."""
    own = ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn())
    return tuple(dict.fromkeys(own))


def make_certificates(
    folder: Path,
    addresses: tuple[str, ...],
    authority: Authority | None = None,
    *,
    days: int | None = None,
    roles: tuple[Role, ...] = (),
) -> TlsFiles:
    """Write ``cert.pem``, ``key.pem`` and ``ca.pem`` below ``folder``.

    The certificate serves both ends of a connection at all of ``addresses``, for processes of
    ``roles`` (none: of all), for so many ``days`` or longer than any run. Without ``authority``
    there is one for it alone, which is forgotten.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    authority = authority or Authority.make()
    made = KeyRequest.make()
    life = None if days is None else datetime.timedelta(days=days)
    contents = {
        "cert": authority.sign(made.request, addresses, life=life, roles=roles),
        "key": made.key,
        "ca": authority.pem,
    }
    paths = {name: _write(folder / f"{name}.pem", text.encode()) for name, text in contents.items()}
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


def _subject(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _signed(
    common_name: str,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Certificate | None,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    addresses: tuple[str, ...] = (),
    uris: tuple[str, ...] = (),
    life: datetime.timedelta | None = None,
) -> x509.Certificate:
    """A certificate for ``addresses``; an authority's own where there is no ``issuer``."""
    now = datetime.datetime.now(datetime.UTC)
    name = _subject(common_name)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if issuer is None else issuer.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + (_LIFE if life is None else life))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
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
                x509.SubjectAlternativeName(
                    [
                        *map(_general_name, addresses),
                        *map(x509.UniformResourceIdentifier, uris),
                    ]
                ),
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


def _names_of(cert: x509.Certificate | x509.CertificateSigningRequest) -> list[str]:
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
