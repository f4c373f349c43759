"""A command's failure is the command's, as long as it has changed nothing.

Commands run on the engine loop's thread, where an exception that is not ours ends the rank, as it
must: nobody knows what was half done. Looking and checking change nothing, though, and what comes
from another process is looked at there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from runtime.errors import TandemError
from runtime.logging import get_logger

logger = get_logger(__name__)


@contextlib.contextmanager
def before_changes(what: str) -> Iterator[None]:
    """Turn any exception into an answer of INTERNAL that ends the command `what` alone.

    Raises:
        TandemError: one of ours as it is; another as a plain TandemError, whose code is INTERNAL.
            (InternalError says that the books are broken, and does end the loop.)
    """
    try:
        yield
    except TandemError:
        raise
    except Exception as error:
        logger.exception("%s failed before it changed anything", what)
        raise TandemError(f"{what}: {type(error).__name__}: {error}") from error
