"""A bucket on loopback, in as much of S3's protocol as listing and reading need."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


@contextmanager
def running_bucket(bucket: str, files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve ``files`` by key, to those who sign their requests; yields the address.

    Nothing is checked of a signature but that there is one: it is the client that is tried.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            key = address.path.removeprefix(f"/{bucket}").strip("/")
            if not self.headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256 "):
                self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
            elif not key:
                self._answer(200, _listing(bucket, files, parse_qs(address.query)))
            elif key not in files:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                self._answer(200, files[key])

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"0"')
            self.send_header("Last-Modified", "Sat, 28 Nov 2026 12:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _listing(bucket: str, files: Mapping[str, bytes], query: Mapping[str, list[str]]) -> bytes:
    """What ListObjectsV2 answers, in one page."""
    prefix = query.get("prefix", [""])[0]
    found = [key for key in sorted(files) if key.startswith(prefix)]
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><Size>{len(files[key])}</Size>"
        "<ETag>&quot;0&quot;</ETag><LastModified>2026-11-28T12:00:00.000Z</LastModified>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key in found
    )
    return (
        f'<ListBucketResult xmlns="{_NAMESPACE}"><Name>{bucket}</Name>'
        f"<Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        f"{contents}</ListBucketResult>"
    ).encode()
