"""The Hugging Face hub, through its own library: what a model consists of, and its files.

The library reads HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN itself. Its errors become ours
here. They name addresses that are signed, and so secrets: only what we say ourselves is repeated.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from deploy.errors import ClusterError
from runtime.hub_model import HubModel

_LIST_TIMEOUT_S = 20.0
_NUM_CONNECTIONS = 8
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TALKATIVE = ("httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub")
"""Loggers that tell of each request, with its address."""


class HubError(ClusterError):
    """The hub does not give what was asked for; the message says what to do."""

    def __init__(self, problem: str, fix: str, *, is_passing: bool = False) -> None:
        """``is_passing``: another try may end better."""
        super().__init__(f"{problem}. Fix: {fix}")
        self.problem = problem
        self.fix = fix
        self.is_passing = is_passing


class UnreachableError(HubError):
    """It was not asked, or did not answer, or not us: what is here already may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a model.

    Attributes:
        name: its path in the model's folder.
        size: bytes.
        sha256: of a large file, else empty.
        blob_id: Git's name for the content of a small one.
    """

    name: str
    size: int
    sha256: str
    blob_id: str

    @property
    def content_id(self) -> str:
        """Equal for equal contents; also what the cache calls the file."""
        return self.sha256 or self.blob_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a revision of a model holds."""

    commit: str
    files: tuple[HubFile, ...]


def cache_folder(model: HubModel) -> Path:
    """Where the library keeps all revisions of a model."""
    from huggingface_hub import constants

    name = f"models--{model.repo.replace('/', '--')}"
    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / name


def list_files(model: HubModel) -> Listing:
    """Ask the hub.

    Raises:
        HubError: there is no such model or revision.
        UnreachableError: it is not to be asked, does not answer, or shows the model to others only.
    """
    from huggingface_hub import HfApi

    with _errors_mapped(model):
        info = HfApi().model_info(
            model.repo, revision=model.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S
        )
    files = tuple(
        HubFile(
            name=one.rfilename,
            size=one.size or 0,
            sha256=one.lfs.sha256 if one.lfs else "",
            blob_id=one.blob_id or "",
        )
        for one in info.siblings or ()
    )
    return Listing(commit=info.sha or "", files=files)


def bring(model: HubModel, names: Sequence[str], to: Path | None) -> Path:
    """Download the files ``names`` where they are not there; the folder of all of them.

    It is ``to``, or the revision's in the cache.

    Raises:
        HubError: that did not come to its end; whole files stay.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _errors_mapped(model), _ended_by_ctrl_c():
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            local_dir=to,
            allow_patterns=[glob.escape(name) for name in names],
            max_workers=_NUM_CONNECTIONS,
        )
    return Path(folder)


def find_cached(model: HubModel) -> Path | None:
    """The folder of a revision in the cache, as far as it is there; the hub is not asked."""
    folder = cache_folder(model)
    ref = folder / "refs" / model.revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else model.revision
    found = folder / "snapshots" / commit
    return found if found.is_dir() else None


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """End the process at once: the library would bring the files first that it has begun."""

    def end(number: int, frame: FrameType | None) -> None:
        Console(stderr=True).show_cursor(True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextlib.contextmanager
def _errors_mapped(model: HubModel) -> Iterator[None]:
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    except Exception as error:  # of the library that it calls by, which differs by version
        raise _as_hub_error(model, error) from None


def _as_hub_error(model: HubModel, error: Exception) -> HubError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it has looked in its cache as well
    endpoint = re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)  # without a password
    if _has_no_room(error):
        problem, fix = (
            f"{model}: the disk is full",
            "room for all of it, or another HF_HOME or --to",
        )
        return HubError(problem, f"{fix}, and the same command again: whole files stay")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnreachableError(f"{model}: HF_HUB_OFFLINE is set", "unset it to download the model")
    if isinstance(error, errors.RevisionNotFoundError):
        problem = f"{model}: {endpoint} has {model.repo}, but no revision {model.revision!r}"
        return HubError(problem, "a branch, a tag or a commit of it after the @")
    if isinstance(error, errors.HFValidationError):
        return HubError(f"{model} is no name of a model", "ORG/NAME, or ORG/NAME@REVISION")
    if isinstance(error, errors.HfHubHTTPError):
        return _as_answer(model, endpoint, error)
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where, fix = error.filename or "the folder", "another HF_HOME, or --to"
        return HubError(f"{model}: cannot write to {where} ({error.strerror})", fix)
    problem = f"{model}: the connection to {endpoint} fails ({type(error).__name__})"
    fix = "the network, its proxy or HF_ENDPOINT, and the same command again: whole files stay"
    return UnreachableError(problem, fix, is_passing=True)


def _as_answer(model: HubModel, endpoint: str, error: Exception) -> HubError:
    """For an answer that is a refusal."""
    from huggingface_hub import errors, get_token

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    has_token = bool(get_token())
    shown = "the token that was shown may not" if has_token else "no token was shown"
    fix = "HF_TOKEN of an account that may" if has_token else "HF_TOKEN, or `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        page = f"accept its terms at {endpoint}/{model.repo} first"
        return UnreachableError(
            f"{model} is gated at {endpoint}, and {shown}", f"{page}, then {fix}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        problem = f"{model}: {endpoint} has no such model, or it is private and {shown}"
        return UnreachableError(problem, f"ORG/NAME as its page says it, or {fix}")
    if status in (401, 403):
        return UnreachableError(f"{model}: {endpoint} answers {status}, {shown}", fix)
    if isinstance(error, errors.EntryNotFoundError):
        return HubError(f"{model} changed meanwhile", "the same command again", is_passing=True)
    fix = "wait, and the same command again: whole files stay"
    return UnreachableError(f"{model}: {endpoint} answers {status}", fix, is_passing=True)


def _has_no_room(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if os.strerror(errno.ENOSPC) in str(error):  # of what is not written in Python
            return True
        error = error.__cause__ or error.__context__
    return False
