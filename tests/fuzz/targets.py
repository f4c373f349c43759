"""All targets, by the names that ``make fuzz`` and the files of the corpus have for them."""

from __future__ import annotations

from tests.fuzz import files, http_bodies, messages, text, wire

TARGETS = {
    **wire.TARGETS,
    **messages.TARGETS,
    **http_bodies.TARGETS,
    **text.TARGETS,
    **files.TARGETS,
}
