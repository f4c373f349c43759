"""Pages as one document each: markup with style and script in it, and what it may do.

Nothing is loaded from elsewhere, and the policy allows no other style and no other script than
these two, told by their hashes. Only the sign-in and the sign-out have forms: the prompt of the
console is sent by its script.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

SIGN_OUT_MARK = "<!-- sign-out -->"
KEY_MARK = "<!-- prompt-key -->"
KEY_NOTE_MARK = "<!-- prompt-key-note -->"
KEY_NOTE = (
    "It needs an API key with the right <em>inference</em>, which is not stored: "
    "the session of this page is for looking only."
)
PROBLEM_MARK = "<!-- problem -->"
STYLE_MARK = "/* console.css */"
SCRIPT_MARK = "/* console.js */"
SCRIPTS = (
    *("draw.js", "panels.js", "ranks.js", "experts.js"),
    *("workers.js", "prompt.js", "console.js"),
)
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


def load_page(*, asks_for_keys: bool = False) -> Page:
    """The console, from the files of this package; with keys, there is a session to end."""
    script = "".join(map(_read, SCRIPTS))
    markup = _filled(_read("page.html"), SCRIPT_MARK, script)
    marks = {
        SIGN_OUT_MARK: _read("sign_out.html"),
        KEY_MARK: _read("prompt_key.html"),
        KEY_NOTE_MARK: KEY_NOTE,
    }
    for mark, text in marks.items():
        markup = _filled(markup, mark, text if asks_for_keys else "")
    return _page_of(markup, script, has_form=asks_for_keys)


def load_sign_in(problem: str = "") -> Page:
    """The page that asks for a key; ``problem``, in markup: what was wrong with the last one."""
    page = _page_of(_filled(_read("sign_in.html"), PROBLEM_MARK, problem), "", has_form=True)
    # What it stands in for must be asked for anew once there is a session.
    return Page(body=page.body, headers={**page.headers, "Cache-Control": "no-store"})


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _filled(markup: str, mark: str, text: str) -> str:
    assert markup.count(mark) == 1, mark
    return markup.replace(mark, text)


def _page_of(markup: str, script: str, *, has_form: bool) -> Page:
    style = _read("console.css")
    body = _filled(markup, STYLE_MARK, style).encode()
    allowed = _source_of(script) if script else "'none'"
    forms = "'self'" if has_form else "'none'"
    policy = (
        "default-src 'none'",
        f"style-src {_source_of(style)}",
        f"script-src {allowed}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        f"form-action {forms}",
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
