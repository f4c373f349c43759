"""The run directory of a cluster and the state file in it: how commands find a running cluster.

Whoever runs the controller holds the lock for its whole life, so a state file whose lock is free is
left over from a controller that died. The file is replaced whole, never edited; it holds no secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.errors import ClusterError
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


class Phase(enum.StrEnum):
    """Where a cluster, or one process of it, stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINED = "drained"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """One process as people see it."""

    name: str
    role: str
    instance: str
    rank: int
    phase: Phase
    pid: int = 0
    """0 while it is not running."""
    stage: str = ""
    """The last thing it said."""
    num_restarts: int = 0
    log_path: str = ""
    host: str = ""
    """Where it runs, and its log is; empty: the controller's machine."""
    config_path: str = ""
    """The configuration that it was started with, on the controller's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """One run of a cluster as people see it."""

    name: str
    run_id: str
    pid: int
    """The controller's."""
    phase: Phase
    endpoint: str
    control_address: str
    """Of all routers, with commas between."""
    model: str
    started: float
    """Seconds since 1970."""
    controller_address: str = ""
    """Of the controller's own gRPC; empty: it does not listen (yet)."""
    ready_s: float = 0.0
    """Seconds from start to ready; 0 until then."""
    log_dir: str = ""
    error: str = ""
    """Why the phase is FAILED."""
    ray_address: str = ""
    """Of a Ray that a later controller finds it by; empty: Ray ends with the controller."""
    ca: str = ""
    """File of the authority that signed the HTTP side's certificate; empty: plain text."""
    asks_for_keys: bool = False
    """Whether HTTP needs an API key."""
    processes: tuple[ProcessState, ...] = field(default=())
    further_endpoints: tuple[str, ...] = ()
    """Of the routers beside the first."""

    @property
    def where(self) -> str:
        """All endpoints, for people."""
        return ", ".join((self.endpoint, *self.further_endpoints))

    def is_here(self, process: ProcessState) -> bool:
        """Whether ``process`` runs on the controller's machine, where its pid means something."""
        first = self.control_address.partition(",")[0]  # routers are on the controller's machine
        own = first.rpartition(":")[0].strip("[]")
        return process.host in ("", own)

    def to_json(self) -> str:
        """One JSON object, fields named as here."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> ClusterState:
        """The state that ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["phase"] = Phase(values["phase"])
        values["further_endpoints"] = tuple(values.get("further_endpoints", ()))
        values["processes"] = tuple(_process_from(entry) for entry in values["processes"])
        return cls(**values)


def _process_from(entry: Mapping[str, Any]) -> ProcessState:
    return ProcessState(**{**entry, "phase": Phase(entry["phase"])})


class RunDir:
    """The folder of one cluster: state, lock, secret, resolved configuration, logs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log_dir = path / "logs"
        self.config_path = path / "config.toml"
        self.controller_log_path = self.log_dir / "controller.log"
        self.events_path = path / "events.jsonl"
        """What happened, of this run and of those before it."""
        self._state_path = path / "state.json"
        self._is_written = True
        self.tls_dir = path / "tls"
        """Certificates of this run, where it makes its own."""
        self._secret_path = path / "secret"
        self._lock_path = path / "lock"

    def create(self) -> None:
        """Make the folder, private to its owner, with an empty log folder.

        Raises:
            ClusterError: the folder cannot be made.
        """
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise ClusterError(
                f"cannot use {self.path} for state and logs ({error.strerror}); "
                "set cluster.run_dir to a folder that you may write to"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Own this cluster while in the block.

        Raises:
            ClusterError: another controller owns it.
        """
        with self._lock_path.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(self._already_running()) from None
            yield

    def _already_running(self) -> str:
        state = self.read_state()
        where = f" at {state.endpoint} (pid {state.pid})" if state else ""
        name = state.name if state else self.path.name
        return (
            f"cluster {name!r} is already running{where}; stop it with `tandem down`, "
            "or give this one another cluster.name and router ports"
        )

    def is_owned(self) -> bool:
        """Whether a living controller holds the lock."""
        try:
            with self._lock_path.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def read_state(self) -> ClusterState | None:
        """The last state written, or None; it may be left over from a dead controller."""
        try:
            return ClusterState.from_json(self._state_path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def write_state(self, state: ClusterState) -> bool:
        """Replace the state file; whether it could be, as a full disk must stop no cluster."""
        was_written = self._is_written
        try:
            _write_private(self._state_path, state.to_json())
        except OSError as error:
            self._is_written = False
            if was_written:  # not at every attempt
                logger.error("the state file is of before %s", fields(error=error))
        else:
            self._is_written = True
        return self._is_written

    def read_secret(self) -> str:
        """The running cluster's secret; empty when there is none."""
        try:
            return self._secret_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write_secret(self, secret: str) -> None:
        """Keep the secret for commands of the same user."""
        _write_private(self._secret_path, secret)

    def clear_secret(self) -> None:
        """Remove the secret and the run's certificates: nothing is left that would take them."""
        self._secret_path.unlink(missing_ok=True)
        shutil.rmtree(self.tls_dir, ignore_errors=True)

    def clear_state(self) -> None:
        """Remove the state: the cluster is no more. Logs stay."""
        self._state_path.unlink(missing_ok=True)
        _pointer_to(self.path).unlink(missing_ok=True)

    @property
    def has_state(self) -> bool:
        """Whether a run left its state here, or is running."""
        return self._state_path.exists()

    def be_found(self) -> None:
        """Have ``find_run_dir`` find this folder, wherever it is, as long as it has a state."""
        if self.path.parent != default_run_root():
            pointer = _pointer_to(self.path)
            pointer.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_private(pointer, str(self.path))


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def default_run_root() -> Path:
    """Where run directories go by default: one folder per cluster name below it."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "tandem"


def run_dir_of(name: str, run_dir: str) -> RunDir:
    """The run directory of cluster ``name``; ``run_dir`` is ``cluster.run_dir``, maybe empty."""
    root = Path(run_dir).expanduser().resolve() if run_dir else default_run_root()
    return RunDir(root / name)


def _pointer_to(path: Path) -> Path:
    """The file in the default root that says where the run directory ``path`` is.

    No cluster's name begins with a dot.
    """
    return default_run_root() / ".elsewhere" / hashlib.sha256(str(path).encode()).hexdigest()[:16]


def _elsewhere() -> Iterator[RunDir]:
    """The run directories outside of the default root; pointers to what is no more are removed."""
    for pointer in sorted((default_run_root() / ".elsewhere").glob("*")):
        with contextlib.suppress(OSError):
            run_dir = RunDir(Path(pointer.read_text(encoding="utf-8")))
            if run_dir.has_state:
                yield run_dir
            else:
                pointer.unlink()


def known_run_dirs(run_dir: str = "", name: str = "") -> list[RunDir]:
    """The run directories with a state below ``cluster.run_dir``; without one, wherever they are.

    All of them, or those of clusters called ``name``. Where any of these runs, only those that do.
    """
    root = Path(run_dir).expanduser().resolve() if run_dir else default_run_root()
    known = [RunDir(entry.parent) for entry in sorted(root.glob("*/state.json"))]
    if not run_dir:
        known += _elsewhere()
    known = [entry for entry in known if name in ("", entry.path.name)]
    return [entry for entry in known if entry.is_owned()] or known


def find_run_dir(name: str, run_dir: str) -> RunDir:
    """The run directory of a cluster that is known here.

    Without ``name``: the only one that runs, else the only one that left its state behind. Without
    ``run_dir`` it may be anywhere.

    Raises:
        ClusterError: there is none, or several to choose from.
    """
    if name and run_dir:
        return run_dir_of(name, run_dir)
    candidates = known_run_dirs(run_dir, name)
    if len(candidates) == 1:
        return candidates[0]
    if name and not candidates:
        return run_dir_of(name, run_dir)
    if not candidates:
        raise ClusterError("no cluster is running; start one with `tandem up`")
    if name:
        folders = ", ".join(str(entry.path.parent) for entry in candidates)
        raise ClusterError(f"several clusters are named {name!r} ({folders}); choose with --config")
    names = ", ".join(entry.path.name for entry in candidates)
    raise ClusterError(f"several clusters are running ({names}); choose with --name")
