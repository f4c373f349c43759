"""Downloads a model from the hub: only the files that are needed, each whole, once a machine.

A file has its name once its size is right. What is being brought stands in notes beside it until
its contents are verified, so that a process that dies leaves nothing that is taken for whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from deploy.checkpoint.download_display import shown
from deploy.checkpoint.hub import (
    HubError,
    HubFile,
    UnreachableError,
    bring,
    cache_folder,
    find_cached,
    list_files,
)
from runtime.hub_model import HubModel
from runtime.parsing import parse_json

_NEEDED = ("*.json", "*.jinja", "tokenizer.model", "tiktoken.model", "merges.txt", "vocab.txt")
_TEMPLATES = "additional_chat_templates/*.jinja"
_WEIGHTS = "*.safetensors"
_TWICE = "consolidated*"
"""The same weights under the names of another program."""
_INDEX = "model.safetensors.index.json"
_SCRATCH = Path(".cache") / "huggingface" / "download"
"""Below a folder that is not the cache: where the library has unfinished files."""
_NOTES = "tandem-download.json"
_STALE_S = 3600.0
"""Nobody writes to an unfinished file that was not touched for so long."""
NUM_TRIES = 5
"""In a row that brought no file to its end."""
RETRY_S = 2.0


def download(model: HubModel, *, to: Path | None = None, weights: bool = True) -> Path:
    """The folder with all files of ``model`` that are needed to serve it, downloaded if need be.

    Args:
        model: on the hub.
        to: the folder; None: in the hub's cache (HF_HOME).
        weights: without them what is left is what a router, or a plan, needs.

    Raises:
        HubError: that cannot be; the message says why and what to do.
    """
    try:
        listing = list_files(model)
    except UnreachableError as error:
        return _already_here(model, to, weights, error)
    files = tuple(one for one in listing.files if is_needed(one.name, weights=weights))
    _check_listing(model, listing.files)
    target = _target_of(model, to, listing.commit)
    if not target.missing(files, _Notes.read(target.notes_path)):
        return target.folder
    with _locked(model, target.notes_path) as notes:
        target.fetch(model, files, notes)
    return target.folder


def _target_of(model: HubModel, to: Path | None, commit: str = "") -> _Target:
    if to is not None:
        return _Target(folder=to, scratch=to / _SCRATCH, commit=commit, is_cache=False)
    root = cache_folder(model)
    folder = root / "snapshots" / commit if commit else find_cached(model)
    return _Target(folder=folder or root, scratch=root / "blobs", commit=commit, is_cache=True)


def is_needed(name: str, *, weights: bool) -> bool:
    """Whether the file ``name`` of a model is needed to serve it, or else to plan and to route."""
    if name.count("/") == 1 and fnmatch.fnmatchcase(name, _TEMPLATES):
        return True
    if "/" in name or fnmatch.fnmatchcase(name, _TWICE):
        return False
    wanted = (*_NEEDED, _WEIGHTS) if weights else _NEEDED
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)


@dataclass(slots=True)
class _Notes:
    """What is known of the files of one place.

    Attributes:
        unverified: contents that were asked for, and may be anything.
        verified: of a folder that is not the cache, what the files there are, by name.
    """

    unverified: set[str] = field(default_factory=set)
    verified: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _Notes:
        """None but empty ones where there is no such file, or it was cut: nothing came after it."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
            return cls(set(known["unverified"]), dict(known["verified"]))
        return cls()

    def write(self, path: Path) -> None:
        """In the place of those that are there."""
        known = {"unverified": sorted(self.unverified), "verified": self.verified}
        path.write_text(json.dumps(known), encoding="utf-8")


@contextlib.contextmanager
def _locked(model: HubModel, path: Path) -> Iterator[_Notes]:
    """The notes at ``path``, while whoever else downloads the same waits.

    Raises:
        HubError: they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"{model}: another process downloads it; waiting", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield _Notes.read(path)
    except OSError as error:  # of the notes, or of files beside them
        problem = f"{model}: cannot write to {path.parent} ({error.strerror})"
        raise HubError(problem, "room and rights there, another HF_HOME, or --to") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """Where files go.

    Attributes:
        folder: of the whole ones.
        scratch: where the library has unfinished ones.
        commit: of the files; empty: not known.
        is_cache: the folder is of one commit, and its files are named after their contents.
    """

    folder: Path
    scratch: Path
    commit: str
    is_cache: bool

    @property
    def notes_path(self) -> Path:
        """Where this keeps what it knows."""
        return self.scratch.parent / _NOTES

    def missing(self, files: Sequence[HubFile], notes: _Notes) -> list[HubFile]:
        """Those that are not there, or may be something else."""
        return [
            one
            for one in files
            if not self._has(one)
            or one.content_id in notes.unverified
            or not (self.is_cache or notes.verified.get(one.name) == one.content_id)
        ]

    def fetch(self, model: HubModel, files: Sequence[HubFile], notes: _Notes) -> None:
        """Bring what is missing, and verify it.

        Raises:
            HubError: not all of it is there, and right.
        """
        new = self.missing(files, notes)
        if not new:  # whoever held the lock has brought it
            return
        self._sweep()
        self._check_room(model, [one for one in new if not self._has(one)])
        notes.unverified |= {one.content_id for one in new}
        notes.write(self.notes_path)
        for one in new:
            if not self._has(one):
                self._discard(one)  # the library would take it for whole
        total = sum(one.size for one in files)
        with shown(f"downloading {model}", total, lambda: self._num_bytes(files)):
            self._bring_all(model, files)
        print(f"{model}: verifying {len(new)} files", file=sys.stderr)
        with ThreadPoolExecutor() as pool:
            verdicts = list(pool.map(self._is_right, new))
        wrong = [one for one, is_right in zip(new, verdicts, strict=True) if not is_right]
        for one in wrong:
            self._discard(one)
        right = [one for one in new if one not in wrong]
        notes.unverified -= {one.content_id for one in right}
        if not self.is_cache:
            notes.verified |= {one.name: one.content_id for one in right}
        notes.write(self.notes_path)
        if wrong:
            names = ", ".join(one.name for one in wrong)
            problem = f"{model}: {names}: not what the hub says it is, and thrown away"
            raise HubError(problem, "the same command again; if it stays, another HF_ENDPOINT")

    def _has(self, file: HubFile) -> bool:
        """Whether it is there in its size."""
        path = self.folder / file.name
        return path.is_file() and path.stat().st_size == file.size

    def _bring_all(self, model: HubModel, files: Sequence[HubFile]) -> None:
        names, tries = [one.name for one in files], 0
        # The cache remembers what a branch is. A folder is of one commit, whatever that is by then.
        asked = model if self.is_cache else HubModel(repo=model.repo, revision=self.commit)
        while True:
            num_there = sum(map(self._has, files))
            try:
                folder = bring(asked, names, None if self.is_cache else self.folder)
            except HubError as error:
                tries = 1 if sum(map(self._has, files)) > num_there else tries + 1
                if not error.is_passing or tries >= NUM_TRIES:
                    raise
                time.sleep(RETRY_S)
                continue
            if self.is_cache and folder != self.folder:
                raise HubError(f"{model} changed meanwhile", "the same command again")
            return

    def _num_bytes(self, files: Sequence[HubFile]) -> int:
        """Of files that are whole, and of those that are not yet."""
        number = sum(one.size for one in files if self._has(one))
        for path in self._unfinished():
            with contextlib.suppress(OSError):  # it has got its name meanwhile
                number += path.stat().st_size
        return number

    def _sweep(self) -> None:
        """Remove what processes have left that were killed: the library takes up no file again."""
        for path in self._unfinished():
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()

    def _unfinished(self) -> list[Path]:
        return list(self.scratch.rglob("*.incomplete"))

    def _check_room(self, model: HubModel, missing: Sequence[HubFile]) -> None:
        needed, free = sum(one.size for one in missing), shutil.disk_usage(self.scratch.parent).free
        if needed > free:
            where = self.scratch.parent
            problem = (
                f"{model} needs {needed / 1e9:.1f} GB more in {where}: {free / 1e9:.1f} GB free"
            )
            raise HubError(problem, "more room there, another HF_HOME, or --to")

    def _is_right(self, file: HubFile) -> bool:
        path = self.folder / file.name
        return self._has(file) and _hash(path, file) == file.content_id

    def _discard(self, file: HubFile) -> None:
        path = self.folder / file.name
        path.resolve().unlink(missing_ok=True)  # of the cache, the file that the name points to
        path.unlink(missing_ok=True)


def _hash(path: Path, file: HubFile) -> str:
    with path.open("rb") as content:
        if file.sha256:
            return hashlib.file_digest(content, "sha256").hexdigest()
        return hashlib.sha1(b"blob %d\0" % file.size + content.read()).hexdigest()


def _check_listing(model: HubModel, files: Sequence[HubFile]) -> None:
    names = [one.name for one in files]
    for pattern in ("config.json", _WEIGHTS):
        if not any(fnmatch.fnmatchcase(name, pattern) and "/" not in name for name in names):
            fix = "a model that is published in safetensors"
            raise HubError(f"{model} holds no {pattern}", fix)


def _already_here(model: HubModel, to: Path | None, weights: bool, why: HubError) -> Path:
    """What an earlier download has left, where the hub says nothing.

    Raises:
        HubError: ``why``; nothing whole is here.
    """
    target = _target_of(model, to)
    if not _seems_whole(target.folder, weights):
        where = f"no whole copy of it is in {to or cache_folder(model)}"
        raise HubError(f"{why.problem}, and {where}", why.fix)
    if _Notes.read(target.notes_path).unverified:
        problem = f"{why.problem}, and the copy in {target.folder} was cut while it was downloaded"
        raise HubError(problem, why.fix)
    print(f"{why.problem}: taking {target.folder}", file=sys.stderr)
    return target.folder


def _seems_whole(folder: Path, weights: bool) -> bool:
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    index = folder / _INDEX
    if not index.is_file():
        return any(folder.glob(_WEIGHTS))
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        named = set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in named)
    return False
