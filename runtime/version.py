"""Which version of the package runs."""

from __future__ import annotations

from importlib import metadata


def installed_version() -> str | None:
    """Of the installed package; None where a source tree runs that is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return None
