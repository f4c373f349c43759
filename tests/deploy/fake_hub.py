"""A hub of models on this machine that speaks the real one's protocol, and breaks off when told."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 4096
"""Bytes from which a file is stored apart, under its SHA-256."""


@dataclass
class Model:
    """One of the hub: its revisions, each with its files."""

    revisions: dict[str, dict[str, bytes]]
    token: str = ""
    """Whoever asks must show it; empty: nobody must."""
    is_gated: bool = False

    def commit_of(self, revision: str) -> str:
        """Forty digits that stand for the contents of a revision."""
        files = self.revisions[revision]
        text = "".join(f"{name} {hashlib.sha1(files[name]).hexdigest()}" for name in sorted(files))
        return hashlib.sha1(text.encode()).hexdigest()

    def find(self, revision: str) -> dict[str, bytes] | None:
        """The files of a branch or a commit."""
        for name, files in self.revisions.items():
            if revision in (name, self.commit_of(name)):
                return files
        return None


@dataclass
class Hub:
    """What it has, what it does wrong, and what it was asked."""

    models: dict[str, Model]
    endpoint: str = ""
    store: str = ""
    """Where large files are."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """After how many bytes of a file each answer breaks off, one answer after another."""
    resets: bool = False
    """It breaks off by a reset, not by an end."""
    damaged: set[str] = field(default_factory=set)
    """Files that come with other bytes than they should."""
    stalled: set[str] = field(default_factory=set)
    """Files that stop half way, until they are released."""
    released: threading.Event = field(default_factory=threading.Event)
    status: int = 0
    """Of all answers, where not 0."""
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path, and the Range header of each request."""
    tokens: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """What was shown, by the first part of the path."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def brought(self) -> list[str]:
        """The files whose contents were asked for, sorted."""
        pattern = re.compile(r"/(?:resolve|cdn)/[^/]+/(.+)$")
        with self.lock:
            return sorted(
                found[1]
                for method, path, _ in self.asked
                if method == "GET" and (found := pattern.search(path))
            )

    def forget(self) -> None:
        with self.lock:
            self.asked.clear()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        shown = self.headers.get("Authorization", "").removeprefix("Bearer ")
        with self.hub.lock:
            self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
            self.hub.tokens[path.split("/")[1]].add(shown)
        if self.hub.status:
            return self._send(self.hub.status, b"")
        match = re.match(
            r"/(?:api/models/(?P<api>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<of>[^?]+)|"
            r"cdn/(?P<stored>[^/]+)/(?P<of_name>.+)|"
            r"(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<file>.+))$",
            path,
        )
        if match is None:
            return self._send(404, b"")
        if match["stored"]:
            return self._send_file(match["stored"], match["of_name"])
        repo = match["api"] or match["repo"]
        model = self.hub.models.get(repo)
        if model is None:
            return self._refuse(404, "RepoNotFound")
        if model.token and shown != model.token:
            return self._refuse(401, "GatedRepo" if model.is_gated else "RepoNotFound")
        revision = match["of"] or match["rev"]
        files = model.find(revision)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        commit = next(model.commit_of(name) for name, of in model.revisions.items() if of is files)
        if match["what"] == "revision":
            return self._send_json(_info(repo, commit, files))
        if match["what"] == "tree":
            return self._send_json(_tree(files))
        return self._resolve(commit, files, match["file"])

    def _resolve(self, commit: str, files: Mapping[str, bytes], name: str) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        content, headers = files[name], {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            return self._send(200, content, {**headers, "ETag": f'"{_blob_id(content)}"'})
        headers |= {
            "ETag": f'"{_blob_id(content)}"',
            "X-Linked-ETag": f'"{sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            # Another host, as of the real one: it is shown no token.
            "Location": f"{self.hub.store}/cdn/{sha256(content)}/{name}?Signature=very-secret",
        }
        return self._send(302, b"", headers)

    def _send_file(self, digest: str, name: str) -> None:
        revisions = (one for model in self.hub.models.values() for one in model.revisions.values())
        contents = (files[name] for files in revisions if name in files)
        content = next(one for one in contents if sha256(one) == digest)
        if name in self.hub.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        first = 0
        headers = {"Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            first = int(asked[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        with self.hub.lock:
            cuts = self.hub.cuts.get(name, [])
            cut = cuts.pop(0) if cuts else None
        half = len(content) // 2 if name in self.hub.stalled else None
        self._send(
            206 if first else 200, content[first:], headers, cut=half if cut is None else cut
        )

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        cut: int | None = None,
    ) -> None:
        self.send_response(HTTPStatus(status))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            if self.hub.stalled:
                self.wfile.flush()
                self.hub.released.wait(60)
            self.close_connection = True
            if self.hub.resets:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def _info(repo: str, commit: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    siblings = []
    for name, content in files.items():
        sibling: dict[str, Any] = {"rfilename": name, "size": len(content)}
        sibling["blobId"] = _blob_id(content)
        if len(content) >= LARGE:
            sibling["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 130}
        siblings.append(sibling)
    return {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}


def _tree(files: Mapping[str, bytes]) -> list[dict[str, Any]]:
    entries = []
    for name, content in files.items():
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
        entry["oid"] = _blob_id(content)
        if len(content) >= LARGE:
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 130}
        entries.append(entry)
    return entries


@contextlib.contextmanager
def running_hub(models: dict[str, Model]) -> Iterator[Hub]:
    """A hub that serves ``models`` on the loopback interface."""
    hub = Hub(models=models)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    hub.store = f"http://localhost:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
