"""A stand-in for one rank's process: it tells of its health, and ends as told.

``python -m tests.deploy.fake_rank PORT FOLDER``: the names of files in FOLDER say how it does:
``sick`` (its health says so), ``ready``, ``stubborn`` (SIGTERM is not heeded), ``end-PORT-N`` (it
ends by itself, with status N). With ``key.pem`` and ``cert.pem`` there it speaks TLS.
"""

from __future__ import annotations

import signal
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_well = not (folder / "sick").exists()
            is_ok = is_well if self.path == "/health" else (folder / "ready").exists()
            body = b"fine" if is_ok else b"the engine loop has ended"
            self.send_response(200 if is_ok else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    def stop(*_: object) -> None:
        if not (folder / "stubborn").exists():
            sys.exit(0)

    signal.signal(signal.SIGTERM, stop)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if (folder / "cert.pem").exists():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (folder / f"up-{port}").touch()
    while True:
        for file in folder.glob(f"end-{port}-*"):
            sys.exit(int(file.name.rpartition("-")[2]))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
