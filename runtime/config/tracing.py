"""``[tracing]``: where spans of requests go."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingSection:
    """``[tracing]``: where spans of requests go."""

    endpoint: str = ""
    """Base address of an OpenTelemetry collector that takes OTLP over HTTP, as
    "http://collector:4318"; empty: no spans are made."""
    sample_ratio: float = 1.0
    """Share of the requests that are traced where the client has not decided by its traceparent."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.endpoint)
        if self.endpoint and (parts.scheme not in ("http", "https") or not parts.hostname):
            fix = 'as "http://collector:4318", or "" for no spans'
            raise ConfigError("tracing.endpoint", self.endpoint, "is no http address", fix)
        if not 0.0 <= self.sample_ratio <= 1.0:
            fix = "from 0 (none) to 1 (all)"
            raise ConfigError("tracing.sample_ratio", self.sample_ratio, "is no share", fix)
