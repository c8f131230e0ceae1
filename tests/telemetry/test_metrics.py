"""`/metrics` is Prometheus text with conventional buckets and the speculation counters that dashboards know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry.batch import pack
from telemetry.hub import Hub
from telemetry.metrics import Histogram, Metric, exposition
from telemetry.record import RequestRecord, StepRecord
from telemetry.setup import Telemetry

LINE = re.compile(r'^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*",?)*\})? ([-+0-9.eInf]+)$')


def parse(text: str) -> dict[tuple[str, str], float]:
    """Every sample; fails on a line that is neither sample nor comment, and on one without HELP and TYPE."""
    typed: dict[str, str] = {}
    samples: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in typed, f"{name} is described twice"
            typed[name] = kind
        elif not line.startswith("# HELP "):
            found = LINE.match(line)
            assert found, line
            name, labels, value = found.groups()
            family = re.sub(r"_(bucket|sum|count)$", "", name) if name not in typed else name
            assert family in typed, line
            assert (name, labels or "") not in samples, line
            samples[name, labels or ""] = float(value)
    return samples


@pytest.fixture
def telemetry(tmp_path: Path) -> Telemetry:
    owner = Telemetry(tmp_path / "metrale.duckdb")
    yield owner  # type: ignore[misc]
    owner.close()


def test_every_line_parses_and_counters_agree_with_the_records(telemetry: Telemetry) -> None:
    records = StepStream().take(400)
    telemetry.take(pack([run_record(), *records]))
    samples = parse(telemetry.prometheus())
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert samples["metrale:spec_decode_num_draft_tokens_total", ""] == sum(record.drafted for record in steps)
    assert samples["metrale:spec_decode_num_accepted_tokens_total", ""] == sum(record.accepted for record in steps)
    assert samples["metrale:generation_tokens_total", ""] == sum(record.emitted for record in steps)
    by_position = [
        samples["metrale:spec_decode_num_accepted_tokens_per_pos_total", f'{{position="{at}"}}'] for at in (0, 1, 2)
    ]
    assert sum(by_position) == samples["metrale:spec_decode_num_accepted_tokens_total", ""]
    assert by_position == sorted(by_position, reverse=True)


def test_histograms_are_cumulative_and_end_in_the_count(telemetry: Telemetry) -> None:
    records = StepStream().take(2000)
    telemetry.take(pack([run_record(), *records]))
    samples = parse(telemetry.prometheus())
    requests = sum(isinstance(record, RequestRecord) for record in records)
    for family in ("request_duration", "time_to_first_token", "time_per_output_token"):
        name = f"gen_ai_server_{family}_seconds"
        buckets = [value for (found, _), value in samples.items() if found == f"{name}_bucket"]
        assert buckets == sorted(buckets)
        assert buckets[-1] == requests
        assert sum(value for (found, _), value in samples.items() if found == f"{name}_count") == requests


def test_an_empty_hub_exposes_only_zeros(telemetry: Telemetry) -> None:
    samples = parse(telemetry.prometheus())
    assert samples["metrale:generation_tokens_total", ""] == 0


def test_losses_and_trouble_are_on_metrics(telemetry: Telemetry) -> None:
    telemetry.ingest(b"\xc1 not msgpack", lost=3)
    samples = parse(telemetry.prometheus())
    assert samples["metrale:telemetry_lost_total", '{kind="malformed batch"}'] == 1
    assert samples["metrale:telemetry_lost_total", '{kind="ring"}'] == 3
    assert samples["metrale:telemetry_database_ok", ""] == 1


def test_a_value_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 14.0


def test_labels_with_quotes_and_line_breaks_are_escaped() -> None:
    metric = Metric("x", "gauge", "help", (((("who", 'a "b"\n\\c'),), 1.5),))
    assert exposition([metric], ()).splitlines()[-1] == r'x{who="a \"b\"\n\\c"} 1.5'
    parse(exposition([metric], ()))


def test_failed_requests_are_told_apart_by_error_type() -> None:
    hub = Hub()
    hub.update(pack([run_record()]))
    base = RequestRecord(
        "a", "chat", "", "", "", 0, 1, 0, 10, "error", "broke", 1, 0, 0, 0, 0, 0, 0, {}, {}, 1.0, 1.0, 0, 0, 1
    )
    hub.update(pack([base]))
    [labels] = hub.histograms.duration.members
    assert ("error_type", "error") in labels


def test_samples_of_the_metrics_are_kept_in_the_database(tmp_path: Path) -> None:
    owner = Telemetry(tmp_path / "m.duckdb", metrics_every_s=0.05)
    owner.take(pack([run_record(), *StepStream().take(50)]))
    owner.store.flush()
    owner.close()
    from telemetry.database import open_for_reading

    rows = (
        open_for_reading(owner.path)
        .execute("SELECT max(value) FROM metrics WHERE name = 'metrale:generation_tokens_total'")
        .fetchall()
    )
    assert rows[0][0] == owner.hub.tokens_out
