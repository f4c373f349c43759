"""A connection to the HTTP side of a cluster, in plain text or with TLS as its address says."""

from __future__ import annotations

import http.client
import ssl
from urllib.parse import urlsplit


def connect_http(
    endpoint: str, context: ssl.SSLContext | None, *, timeout_s: float
) -> http.client.HTTPConnection:
    """A connection to ``endpoint``, an http or https address; connects when first used.

    ``context`` is for https; None believes the authorities that this machine believes.
    """
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
