"""A small OpenTelemetry collector: a process of its own that decodes OTLP/HTTP and tells what it got, as JSON lines.

`python -m tests.telemetry.collector PORT [DELAY_S] [REFUSE_FIRST]`: answers after a delay, refuses the first requests.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

delay_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
refuse_first = int(sys.argv[3]) if len(sys.argv) > 3 else 0


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind) if kind else None


def attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: value(pair.value) for pair in pairs}


def spans(body: bytes) -> list[dict[str, Any]]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        {
            "resource": attributes(resource.resource.attributes),
            "name": span.name,
            "kind": span.kind,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent": span.parent_span_id.hex(),
            "start": span.start_time_unix_nano,
            "end": span.end_time_unix_nano,
            "status": span.status.code,
            "attributes": attributes(span.attributes),
            "links": [[link.trace_id.hex(), link.span_id.hex()] for link in span.links],
        }
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def metrics(body: bytes) -> list[dict[str, Any]]:
    message = ExportMetricsServiceRequest.FromString(body)
    return [
        {"metric": metric.name, "unit": metric.unit, "kind": metric.WhichOneof("data")}
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]


class Handler(BaseHTTPRequestHandler):
    refused = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        time.sleep(delay_s)
        if Handler.refused < refuse_first:
            Handler.refused += 1
            self.send_response(503)
            self.end_headers()
            return
        found = spans(body) if self.path == "/v1/traces" else metrics(body)
        # in one write: requests are answered by threads, and `print` writes the end of a line on its own
        sys.stdout.write("".join(f"{json.dumps(line)}\n" for line in found))
        sys.stdout.flush()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    server.serve_forever()
