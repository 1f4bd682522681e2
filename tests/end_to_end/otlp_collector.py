"""A collector of OpenTelemetry's spans, as far as a test needs one: OTLP over HTTP, in protobuf."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """Spans with the service that sent them."""

    url: str
    spans: list[tuple[str, Span]] = field(default_factory=list)
    received: bytes = b""

    def take(self, body: bytes) -> None:
        self.received += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {each.key: each.value.string_value for each in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(about["service.name"], span) for span in scope.spans]

    def named(self, name: str, service: str) -> Span:
        """The only one of that name and service."""
        (found,) = [span for by, span in self.spans if span.name == name and by == service]
        return found

    def children_of(self, parent: Span) -> list[Span]:
        """In the order in which they began."""
        found = [span for _, span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@contextmanager
def collecting() -> Iterator[Collector]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                collector.take(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
