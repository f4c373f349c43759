"""The page as one document: its markup with style and script in it, and what it may do.

Nothing is loaded from elsewhere, and the policy allows no other style and no other script than
these two, told by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

STYLE_MARK = "/* console.css */"
SCRIPT_MARK = "/* console.js */"
SCRIPTS = ("draw.js", "panels.js", "workers.js", "console.js")
"""One script, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A document and its headers."""

    body: bytes
    headers: dict[str, str]

    @property
    def etag(self) -> str:
        """Changes with the document."""
        return self.headers["ETag"]


def load_page() -> Page:
    """Read the files of this package."""
    folder = files(__package__)
    style, markup, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("console.css", "page.html", *SCRIPTS)
    )
    script = "".join(scripts)
    assert markup.count(STYLE_MARK) == markup.count(SCRIPT_MARK) == 1
    body = markup.replace(STYLE_MARK, style).replace(SCRIPT_MARK, script).encode()
    policy = (
        "default-src 'none'",
        f"style-src {_source_of(style)}",
        f"script-src {_source_of(script)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(body=body, headers=headers)


def _source_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
