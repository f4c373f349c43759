"""What a loopback peer is given to write here: where, with which token, which regions."""

from __future__ import annotations

import json
from dataclasses import dataclass

from runtime.errors import TransferFailedError
from runtime.parsing import parse_json

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A region of the peer's memory: the key that names it, and its size."""

    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoopbackEndpoint:
    """Address, name, token and regions of a loopback transport."""

    name: str
    host: str
    port: int
    generation: int
    token: bytes
    regions: dict[str, RemoteRegion]

    def encode(self) -> bytes:
        """For the handshake."""
        values = {
            "name": self.name,
            "host": self.host,
            "port": self.port,
            "generation": self.generation,
            "token": self.token.hex(),
            "regions": {k: [v.key.hex(), v.nbytes] for k, v in self.regions.items()},
        }
        return json.dumps(values, sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> LoopbackEndpoint:
        """What ``encode`` wrote.

        Raises:
            TransferFailedError: it is no loopback endpoint.
        """
        try:
            values = parse_json(data)
            regions = {
                str(label): RemoteRegion(bytes.fromhex(key), int(nbytes))
                for label, (key, nbytes) in values["regions"].items()
            }
            return cls(
                name=str(values["name"]),
                host=str(values["host"]),
                port=int(values["port"]),
                generation=int(values["generation"]),
                token=bytes.fromhex(values["token"]),
                regions=regions,
            )
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
            raise TransferFailedError(f"not a loopback endpoint: {error!r}") from error
