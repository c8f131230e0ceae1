"""The metrics of the server: GenAI histograms, speculation counters in the common shape, decisions, KV, losses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

REQUEST_DURATION_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TIME_TO_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Bucket bounds of the GenAI semantic conventions, in seconds."""

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Histogram:
    """Counts by bucket; a value on a bound belongs to the bucket below it."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class HistogramFamily:
    """One histogram per set of labels."""

    name: str
    help: str
    bounds: tuple[float, ...]
    members: dict[Labels, Histogram] = field(default_factory=dict)

    def observe(self, labels: Labels, value: float) -> None:
        member = self.members.get(labels)
        if member is None:
            member = self.members[labels] = Histogram(self.bounds)
        member.observe(value)


class RequestHistograms:
    """The three histograms of the conventions, fed once per request."""

    def __init__(self) -> None:
        self.duration = HistogramFamily(
            "gen_ai.server.request.duration", "Duration of a request, up to its last token.", REQUEST_DURATION_S
        )
        self.ttft = HistogramFamily(
            "gen_ai.server.time_to_first_token", "Time until the first token of a request.", TIME_TO_FIRST_TOKEN_S
        )
        self.tpot = HistogramFamily(
            "gen_ai.server.time_per_output_token", "Time per token after the first one.", TIME_PER_OUTPUT_TOKEN_S
        )

    def families(self) -> tuple[HistogramFamily, ...]:
        return self.duration, self.ttft, self.tpot


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or gauge with its values by labels."""

    name: str
    kind: str
    """counter or gauge."""
    help: str
    values: tuple[tuple[Labels, float], ...]


def exposition(metrics: list[Metric], histograms: tuple[HistogramFamily, ...]) -> str:
    """Prometheus text format 0.0.4."""
    lines: list[str] = []
    for metric in metrics:
        lines += (f"# HELP {metric.name} {_escape_help(metric.help)}", f"# TYPE {metric.name} {metric.kind}")
        lines += (f"{metric.name}{_labels(labels)} {_number(value)}" for labels, value in metric.values)
    for family in histograms:
        name = prometheus_name(family.name)
        lines += (f"# HELP {name} {_escape_help(family.help)}", f"# TYPE {name} histogram")
        for labels, histogram in tuple(family.members.items()):
            lines += _histogram_lines(name, labels, histogram)
    return "\n".join(lines) + "\n"


def prometheus_name(name: str) -> str:
    """`gen_ai.server.request.duration` is exposed as `gen_ai_server_request_duration_seconds`."""
    return name.replace(".", "_") + "_seconds"


def _histogram_lines(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    seen = 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        seen += count
        edge = "+Inf" if bound is None else _number(bound)
        yield f"{name}_bucket{_labels((*labels, ('le', edge)))} {seen}"
    yield f"{name}_sum{_labels(labels)} {_number(histogram.total)}"
    yield f"{name}_count{_labels(labels)} {seen}"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
