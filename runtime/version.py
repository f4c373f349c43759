"""Which version of the package runs, and what it speaks with the others of its cluster."""

from __future__ import annotations

from importlib import metadata
from typing import Final

WIRE: Final = 1
"""Number of all that processes of a cluster say to each other. Processes of other numbers refuse
each other where they first meet, by name; those of one number work together, whatever their
versions are.

It grows by one when a process of the number before would misread, or miss, what one of this number
says:

- a field, a value of an enum, a message or a method of ``proto/`` goes, or gets another number or
  type, or means something else, or its absence does;
- a new one has to be understood by whoever gets it;
- bytes that we lay out ourselves change: greeting and frames of calls, hello, frames and records of
  a transfer, the text of a KV layout, hashes of blocks;
- `xgrammar` has another version: grammars travel as it serializes them.

It stays where something is added whose absence says what was so before, and which those who do not
know it may skip. `tests/runtime/golden.txt` has the bytes of each of these: a test fails where they
change, and `make proto` writes them anew, changed ones only with a number that has grown.
"""


def installed_version() -> str | None:
    """Of the installed package; None where a source tree runs that is not installed."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return None
