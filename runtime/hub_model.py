"""The name of a model on the Hugging Face hub: ``ORG/NAME`` or ``ORG/NAME@REVISION``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(@(?P<revision>{_PART}(/{_PART})*))?")
_FILES = (".toml", ".json", ".safetensors", ".gguf")
"""How a path of this shape ends that nobody means as a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model there.

    Attributes:
        repo: "ORG/NAME".
        revision: a branch, a tag or a commit.
    """

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"

    @classmethod
    def parse(cls, text: str) -> HubModel | None:
        """The model that ``text`` is the name of; None where it has no such shape."""
        match = _NAME.fullmatch(text)
        if match is None or text.endswith(_FILES):
            return None
        return cls(repo=match["repo"], revision=match["revision"] or "main")

    @classmethod
    def meant_by(cls, text: str, base: Path | None = None) -> HubModel | None:
        """The same, where ``text`` may be a path as well: what is there is meant.

        ``base`` is the folder that a relative path starts from (default: the working directory).
        """
        model = cls.parse(text)
        return None if model is None or ((base or Path()) / text).exists() else model
