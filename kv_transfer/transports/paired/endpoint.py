"""What a peer of a paired transport is given to connect here: address and connection token.

Regions are not in it: they are offered on the connection, together with an instance of the library
that serves this connection alone. Tokens and generations are those of the loopback transport.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from runtime.errors import TransferFailedError
from runtime.parsing import parse_json


@dataclass(frozen=True, slots=True)
class PairedEndpoint:
    """Where and how to say hello."""

    library: str
    name: str
    host: str
    port: int
    generation: int
    token: str
    """32 bytes in hex."""

    def encode(self) -> bytes:
        """For the handshake."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> PairedEndpoint:
        """What ``encode`` wrote.

        Raises:
            TransferFailedError: it is no endpoint of a paired transport.
        """
        try:
            values = parse_json(data)
            bytes.fromhex(values["token"])
            return cls(
                library=str(values["library"]),
                name=str(values["name"]),
                host=str(values["host"]),
                port=int(values["port"]),
                generation=int(values["generation"]),
                token=str(values["token"]),
            )
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise TransferFailedError(f"not a paired endpoint: {error!r}") from error
