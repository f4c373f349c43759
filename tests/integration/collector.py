"""A collector of spans for tests: OTLP over HTTP, on a thread of this process."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import Any


class Collector:
    """Takes spans by ``POST /v1/traces``."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """With the service that sent each."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._take(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def of(self, trace_id: str) -> list[tuple[str, Any]]:
        return [each for each in self.spans if each[1].trace_id.hex() == trace_id]

    def _take(self, request: http.server.BaseHTTPRequestHandler) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )

        body = request.rfile.read(int(request.headers["Content-Length"]))
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
            named = {a.key: a.value.string_value for a in of_process.resource.attributes}
            for of_scope in of_process.scope_spans:
                self.spans += [(named["service.name"], span) for span in of_scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        request.send_response(200)
        request.send_header("Content-Type", "application/x-protobuf")
        request.send_header("Content-Length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)


def attributes_of(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
