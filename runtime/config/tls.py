"""``[tls]``: how connections are encrypted, and who must show a certificate."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.checks import one_of
from runtime.errors import ConfigError
from runtime.net.credentials import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSection:
    """``[tls]``: how connections are encrypted, and who must show a certificate."""

    mode: str = "off"
    """"off" (plain text), "files" (those named here), or "auto" (made anew for each run by
    ``tandem up``)."""
    cert: str = ""
    """PEM file of each process's certificate, for the addresses of all hosts that read it."""
    key: str = ""
    """PEM file of its key, without a passphrase."""
    ca: str = ""
    """PEM file of the authority. Whoever has a certificate of it is taken for one of the cluster,
    of the roles that it names: let it sign nothing else."""
    mutual: bool = True
    """Callers of gRPC and of the sockets of KV show a certificate too."""
    http_mutual: bool = False
    """So do clients of HTTP and of the workers' metrics."""

    def __post_init__(self) -> None:
        one_of("tls.mode", self.mode, ("off", "files", "auto"))
        for name in ("cert", "key", "ca"):
            path = getattr(self, name)
            if self.mode == "files" and not path:
                problem = 'tls.mode is "files"'
                raise ConfigError(f"tls.{name}", "", problem, "the path of a PEM file")
            if self.mode != "files" and path:
                problem = f'tls.mode is "{self.mode}": it would not be used'
                raise ConfigError(f"tls.{name}", path, problem, 'tls.mode = "files"')

    @property
    def files(self) -> TlsFiles | None:
        """The files; None with "off", and with "auto" until they are made."""
        if self.mode != "files":
            return None
        return TlsFiles(
            cert=self.cert,
            key=self.key,
            ca=self.ca,
            mutual=self.mutual,
            http_mutual=self.http_mutual,
        )
