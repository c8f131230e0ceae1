"""The same metrics for a collector: data points of the OpenTelemetry SDK, sent over OTLP/HTTP now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from telemetry.metrics import HistogramFamily, Labels, Metric

_TIMEOUT_S = 5.0
_SCOPE = InstrumentationScope("metrale")
_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE


class MetricsSender:
    """Sends cumulative values; a lost message loses nothing but its moment."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # failures are counted by the caller
        self._exporter = OTLPMetricExporter(metrics_endpoint(endpoint), timeout=_TIMEOUT_S)

    def send(
        self, resource: Resource, began_ns: int, now_ns: int, metrics: Sequence[Metric],
        histograms: Sequence[HistogramFamily],
    ) -> bool:  # fmt: skip
        """Whether the collector took them."""
        points = [*_numbers(metrics, began_ns, now_ns), *_histograms(histograms, began_ns, now_ns)]
        scope = sdk.ScopeMetrics(_SCOPE, points, "")
        data = sdk.MetricsData([sdk.ResourceMetrics(resource, [scope], "")])
        return self._exporter.export(data) is sdk.MetricExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()


def metrics_endpoint(endpoint: str) -> str:
    """The URL for metrics beside the one for traces."""
    return endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/metrics"


def _numbers(metrics: Sequence[Metric], began_ns: int, now_ns: int) -> Iterator[sdk.Metric]:
    for metric in metrics:
        points = [
            sdk.NumberDataPoint(
                attributes=dict(labels), start_time_unix_nano=began_ns, time_unix_nano=now_ns, value=value
            )
            for labels, value in metric.values
        ]
        if points:
            counts = metric.kind == "counter"
            data = sdk.Sum(points, _CUMULATIVE, is_monotonic=True) if counts else sdk.Gauge(points)
            yield sdk.Metric(_dotted(metric.name), metric.help, "1", data)


def _histograms(families: Sequence[HistogramFamily], began_ns: int, now_ns: int) -> Iterator[sdk.Metric]:
    for family in families:
        points = [
            sdk.HistogramDataPoint(
                attributes=_attributes(labels), start_time_unix_nano=began_ns, time_unix_nano=now_ns,
                count=histogram.count, sum=histogram.total, bucket_counts=list(histogram.counts),
                explicit_bounds=list(histogram.bounds), min=0.0, max=0.0,
            )
            for labels, histogram in tuple(family.members.items())
        ]  # fmt: skip
        if points:
            yield sdk.Metric(family.name, family.help, "s", sdk.Histogram(points, _CUMULATIVE))


def _attributes(labels: Labels) -> dict[str, str]:
    """Prometheus label names back to attribute names of the conventions."""
    return {_ATTRIBUTES.get(name, name): value for name, value in labels}


_ATTRIBUTES = {
    "gen_ai_operation_name": "gen_ai.operation.name",
    "gen_ai_provider_name": "gen_ai.provider.name",
    "gen_ai_request_model": "gen_ai.request.model",
    "error_type": "error.type",
}


def _dotted(name: str) -> str:
    return name.replace(":", ".").removesuffix("_total")
