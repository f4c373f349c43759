"""A connection to the HTTP side of a cluster, in plain text or with TLS as its address says."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

from deploy.errors import ClusterError
from runtime.net.credentials import Credentials
from runtime.net.roles import Role
from runtime.parsing import parse_json


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


def fetch_json(endpoint: str, path: str, credentials: Credentials, *, timeout_s: float) -> Any:
    """What the router at ``endpoint`` answers to a GET of ``path``.

    Raises:
        ClusterError: it does not answer, or refuses.
    """
    connection = connect_http(endpoint, credentials.client_ssl_context(), timeout_s=timeout_s)
    try:
        # Whoever has the secret is the cluster, also where the router asks for keys.
        headers = {"Authorization": f"Bearer {credentials.shown_to(Role.ROUTER)}"}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        if response.status == 200:
            return parse_json(body)
        problem = f"it answered {response.status}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        problem = str(error) or type(error).__name__
    finally:
        connection.close()
    raise ClusterError(
        f"the router at {endpoint} does not say {path}: {problem}; see `tandem logs`"
    )
