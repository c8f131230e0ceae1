"""The named views: each answers one daily question from the rollups, and says in one sentence what it shows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import duckdb

from telemetry.names import SUCCEEDED


@dataclass(frozen=True, slots=True)
class View:
    name: str
    sentence: str
    sql: str


def _view(name: str, sentence: str, sql: str) -> View:
    return View(name, sentence, sql.strip())


_STEP_ATTRIBUTES = ", ".join(
    f"'metrale.{name}', {name}"
    for name in (
        "step_id", "tick", "width", "rows", "prefill_tokens", "drafted", "accepted", "bonus", "emitted", "drafted_at",
        "accepted_at", "k", "k_reason", "kv_used", "kv_total", "depth", "draft_us", "device_us", "commit_us",
        "cached_tokens", "refusals",
    )
)  # fmt: skip
_GATE_ATTRIBUTES = ", ".join(
    f"'metrale.gate.{name}', g.{name}"
    for name in (
        "mode", "arm", "reason", "arms", "margin", "losses", "depth", "width_bucket", "tokens_until_probe", "pinned",
    )
)  # fmt: skip
_SUCCEEDED = ", ".join(f"'{reason.value}'" for reason in SUCCEEDED)
# a FLOAT of 0.7 would show as 0.699999988 where the caller sent 0.7
_REQUEST_ATTRIBUTES = """
'gen_ai.operation.name', operation, 'gen_ai.provider.name', 'metrale', 'gen_ai.request.model', model,
'gen_ai.response.model', model, 'gen_ai.response.id', request_id, 'gen_ai.response.finish_reasons', [reason],
'gen_ai.request.temperature', temperature::VARCHAR::DOUBLE, 'gen_ai.request.top_p', top_p::VARCHAR::DOUBLE,
'gen_ai.request.top_k', top_k, 'gen_ai.request.max_tokens', max_tokens, 'gen_ai.request.seed', seed,
'gen_ai.request.stream', stream, 'gen_ai.usage.input_tokens', prompt_tokens,
'gen_ai.usage.output_tokens', output_tokens, 'gen_ai.usage.cache_read.input_tokens', cached_tokens,
'metrale.drafted', drafted, 'metrale.accepted', accepted, 'metrale.preemptions', preemptions,
'metrale.prefill.chunks', prefill_chunks, 'gen_ai.conversation.id', nullif(conversation_id, ''),
'metrale.ttft_s', ttft_ms / 1000, 'metrale.tpot_s', tpot_ms / 1000
"""
# Requests, lane steps and gate decisions are stored once, in their typed tables; their spans are composed when asked
# for. Requests that run together stay together for many steps, so links are kept once per set of requests.
_SPANS = f"""
SELECT trace_id, span_id, parent_span_id, name, kind, start, dur_us::BIGINT AS dur_us, status, attributes, events,
  links, run
FROM spans_recorded WHERE name = 'lever.set' OR starts_with(name, 'engine.')
UNION ALL
SELECT q.trace_id, q.span_id, parent_span_id, trim(operation || ' ' || model), 'SERVER', arrived,
  greatest(0, epoch_us(finished) - epoch_us(arrived)), CASE WHEN reason IN ({_SUCCEEDED}) THEN 'UNSET' ELSE 'ERROR' END,
  json_merge_patch('{{}}', json_object({_REQUEST_ATTRIBUTES},
    'error.type', CASE WHEN reason NOT IN ({_SUCCEEDED}) THEN reason END), coalesce(by_lane, '{{}}'))::VARCHAR,
  '[]', [], q.run
FROM requests q JOIN runs r USING (run) LEFT JOIN (
  SELECT request_no, json_merge_patch(json_group_object('metrale.tokens.' || lane, tokens),
    json_group_object('metrale.steps.' || lane, steps)) AS by_lane
  FROM request_lanes GROUP BY request_no) USING (request_no)
WHERE sampled
UNION ALL
SELECT trace_id, left(sha256(span_id || '/' || phase.name), 16), span_id, phase.name, 'INTERNAL', phase.start,
  greatest(0, epoch_us(phase."end") - epoch_us(phase.start)), 'UNSET',
  CASE phase.name WHEN 'prefill' THEN json_object('metrale.prefill.chunks', prefill_chunks) ELSE '{{}}' END::VARCHAR,
  '[]', [], run
FROM (SELECT *, unnest([
    {{'name': 'queue', 'start': arrived, 'end': coalesce(admitted, finished)}},
    {{'name': 'prefill', 'start': admitted, 'end': coalesce(prefill_end, first_token, finished)}},
    {{'name': 'decode', 'start': coalesce(prefill_end, first_token), 'end': finished}}]) AS phase
  FROM requests WHERE sampled)
WHERE phase.start IS NOT NULL
UNION ALL
SELECT trace_id, span_base || '1000000000', '', 'engine.run', 'INTERNAL', started,
  epoch_us(coalesce(ended, last_record, heartbeat, started)) - epoch_us(started), 'UNSET',
  json_object('metrale.run_id', run_id, 'metrale.state', state)::VARCHAR, '[]', [], run
FROM runs
UNION ALL
SELECT r.trace_id, r.span_base || '5' || format('{{:09x}}', step_id), r.span_base || '1000000000',
  'lane.' || lane, 'INTERNAL', start, dur_us, 'UNSET', json_object({_STEP_ATTRIBUTES})::VARCHAR, '[]', 
  list_transform(b.links, lambda link:
    {{'trace_id': replace(link.trace::VARCHAR, '-', ''), 'span_id': format('{{:016x}}', link.span)}}), s.run
FROM lane_steps s JOIN runs r USING (run) LEFT JOIN batches b USING (batch_no)
UNION ALL
SELECT r.trace_id, r.span_base || '6' || format('{{:09x}}', step_id),
  r.span_base || '5' || format('{{:09x}}', step_id),
  'gate.decision', 'INTERNAL', time, 0, 'UNSET', json_object({_GATE_ATTRIBUTES})::VARCHAR, '[]', [], g.run
FROM gate_decisions g JOIN runs r USING (run)
"""

VIEWS: tuple[View, ...] = (
    _view(
        "throughput_by_lane",
        "Tokens per second by lane over time, one row per second.",
        """
SELECT run, second, lane, sum(steps)::BIGINT AS steps, sum(emitted)::BIGINT AS tokens,
  sum(prefill_tokens)::BIGINT AS prefill_tokens,
  round(sum(emitted) / greatest(sum(busy_us), 1) * 1e6, 1) AS tokens_per_busy_s,
  round(sum(busy_us) / 1e6, 3) AS busy_s, round(sum(width_sum) / sum(steps), 2) AS mean_width
FROM step_rollup GROUP BY run, second, lane ORDER BY run, second, lane
""",
    ),
    _view(
        "lanes",
        "What every lane did in a run: steps, tokens, drafts, acceptance, tokens per step and busy second; a pipelined "
        "step that ran beyond a reply's end counts with no token.",
        """
SELECT run, lane, sum(steps)::BIGINT AS steps, sum(emitted)::BIGINT AS tokens,
  sum(prefill_tokens)::BIGINT AS prefill_tokens,
  sum(drafted)::BIGINT AS drafted, sum(accepted)::BIGINT AS accepted,
  round(sum(accepted) / nullif(sum(drafted), 0), 4) AS acceptance,
  round(sum(emitted) / sum(steps), 3) AS tokens_per_step,
  round(sum(emitted) / greatest(sum(busy_us), 1) * 1e6, 1) AS tokens_per_busy_s,
  round(sum(busy_us) / 1e6, 3) AS busy_s,
  round(sum(busy_us) / sum(sum(busy_us)) OVER (PARTITION BY run), 4) AS share_of_time
FROM step_rollup GROUP BY run, lane ORDER BY run, busy_s DESC
""",
    ),
    _view(
        "acceptance_by_position",
        "How often the draft at each position was accepted, by lane.",
        """
SELECT run, lane, position, sum(drafted)::BIGINT AS drafted, sum(accepted)::BIGINT AS accepted,
  round(sum(accepted) / nullif(sum(drafted), 0), 4) AS acceptance
FROM position_rollup GROUP BY run, lane, position ORDER BY run, lane, position
""",
    ),
    _view(
        "acceptance_over_time",
        "Acceptance by lane and minute.",
        """
SELECT run, time_bucket(INTERVAL 1 MINUTE, second) AS minute, lane, sum(drafted)::BIGINT AS drafted,
  sum(accepted)::BIGINT AS accepted, round(sum(accepted) / nullif(sum(drafted), 0), 4) AS acceptance
FROM step_rollup GROUP BY run, minute, lane HAVING sum(drafted) > 0 ORDER BY run, minute, lane
""",
    ),
    _view(
        "gate_timeline",
        "Every change of what the gate does: mode, arm or reason, with what it knew of both arms then.",
        """
SELECT run, time, step_id, mode, arm, reason,
  plain_tokens_per_s, spec_tokens_per_s, margin, losses, depth, width_bucket, tokens_until_probe, pinned
FROM gate_decisions WHERE is_change
""",
    ),
    _view(
        "gate_reasons",
        "How often the gate ran which arm, and why.",
        """
SELECT run, mode, arm, reason, sum(decisions)::BIGINT AS decisions,
  round(sum(decisions) / sum(sum(decisions)) OVER (PARTITION BY run), 4) AS share
FROM gate_rollup GROUP BY run, mode, arm, reason ORDER BY run, decisions DESC
""",
    ),
    _view(
        "why_not_speculating",
        "For every lane that was refused: why, how many steps, and what ran instead.",
        """
SELECT run, lane, reason, taken, sum(steps)::BIGINT AS steps,
  round(sum(steps) / sum(sum(steps)) OVER (PARTITION BY run, lane), 4) AS share_of_refusals
FROM refusal_rollup GROUP BY run, lane, reason, taken ORDER BY run, steps DESC
""",
    ),
    _view(
        "lever_timeline",
        "Every change of a lever: when, who, from where, from what to what, and whether it was refused.",
        """
SELECT run, time, tick, name, old, new, origin, actor, reason, error, change_id
FROM lever_changes ORDER BY run, time
""",
    ),
    _view(
        "lever_effects",
        "Delivered tokens per second and acceptance in the 30 s before and after each lever change.",
        """
SELECT c.run, c.time, c.name, c.old, c.new, c.origin,
  round(sum(s.emitted) FILTER (s.second < c.time)
    / nullif(sum(s.busy_us) FILTER (s.second < c.time), 0) * 1e6, 1) AS tokens_per_s_before,
  round(sum(s.emitted) FILTER (s.second >= c.time)
    / nullif(sum(s.busy_us) FILTER (s.second >= c.time), 0) * 1e6, 1) AS tokens_per_s_after,
  round(sum(s.accepted) FILTER (s.second < c.time)
    / nullif(sum(s.drafted) FILTER (s.second < c.time), 0), 4) AS acceptance_before,
  round(sum(s.accepted) FILTER (s.second >= c.time)
    / nullif(sum(s.drafted) FILTER (s.second >= c.time), 0), 4) AS acceptance_after,
  coalesce(sum(s.steps) FILTER (s.second < c.time), 0)::BIGINT AS steps_before,
  coalesce(sum(s.steps) FILTER (s.second >= c.time), 0)::BIGINT AS steps_after
FROM lever_changes c
LEFT JOIN step_rollup s ON s.run = c.run
  AND s.second BETWEEN c.time - INTERVAL 30 SECOND AND c.time + INTERVAL 30 SECOND
WHERE c.error = ''
GROUP BY c.run, c.time, c.name, c.old, c.new, c.origin, c.change_id ORDER BY c.run, c.time
""",
    ),
    _view(
        "slowest_requests",
        "Requests by total time, longest first, and where that time went.",
        """
SELECT run, request_id, round(total_ms, 1) AS total_ms, round(queue_ms, 1) AS queue_ms,
  round(prefill_ms, 1) AS prefill_ms, round(decode_ms, 1) AS decode_ms, round(ttft_ms, 1) AS ttft_ms,
  round(tpot_ms, 2) AS tpot_ms,
  CASE greatest(queue_ms, coalesce(prefill_ms, 0), coalesce(decode_ms, 0))
    WHEN queue_ms THEN 'queue' WHEN prefill_ms THEN 'prefill' ELSE 'decode' END AS mostly,
  prompt_tokens, cached_tokens, output_tokens, drafted, accepted, preemptions, reason, error
FROM requests ORDER BY requests.total_ms DESC
""",
    ),
    _view(
        "latency_percentiles",
        "TTFT, time per output token, queue and total time of requests: p50, p95, p99 in milliseconds.",
        """
SELECT run, measure, requests, round(q[1], 2) AS p50_ms, round(q[2], 2) AS p95_ms, round(q[3], 2) AS p99_ms, max_ms
FROM (
  SELECT run, measure, count(ms) AS requests, quantile_cont(ms, [0.5, 0.95, 0.99]) AS q, round(max(ms), 2) AS max_ms
  FROM (UNPIVOT (SELECT run, ttft_ms, tpot_ms, queue_ms, prefill_ms, decode_ms, total_ms FROM requests)
    ON ttft_ms, tpot_ms, queue_ms, prefill_ms, decode_ms, total_ms INTO NAME measure VALUE ms)
  GROUP BY run, measure)
ORDER BY run, measure
""",
    ),
    _view(
        "latency_over_time",
        "TTFT and time per output token by minute, p50 and p95 in milliseconds.",
        """
SELECT run, time_bucket(INTERVAL 1 MINUTE, finished) AS minute, count(*) AS requests,
  round(quantile_cont(ttft_ms, 0.5), 2) AS ttft_p50_ms, round(quantile_cont(ttft_ms, 0.95), 2) AS ttft_p95_ms,
  round(quantile_cont(tpot_ms, 0.5), 2) AS tpot_p50_ms, round(quantile_cont(tpot_ms, 0.95), 2) AS tpot_p95_ms
FROM requests GROUP BY run, minute ORDER BY run, minute
""",
    ),
    _view(
        "step_time_percentiles",
        "Duration of a step by lane, p50, p95 and p99 in milliseconds, exact to nine per cent.",
        """
SELECT run, lane, max(total)::BIGINT AS steps,
  round(min(pow(2, (bucket + 0.5) / 8)) FILTER (seen >= total * 0.5) / 1000, 3) AS p50_ms,
  round(min(pow(2, (bucket + 0.5) / 8)) FILTER (seen >= total * 0.95) / 1000, 3) AS p95_ms,
  round(min(pow(2, (bucket + 0.5) / 8)) FILTER (seen >= total * 0.99) / 1000, 3) AS p99_ms
FROM (
  SELECT run, lane, bucket, sum(sum(steps)) OVER (PARTITION BY run, lane ORDER BY bucket) AS seen,
    sum(sum(steps)) OVER (PARTITION BY run, lane) AS total
  FROM step_time_rollup GROUP BY run, lane, bucket)
GROUP BY run, lane ORDER BY run, lane
""",
    ),
    _view(
        "host_time_by_part",
        "Where the time of a step goes, by lane: drafting, device, commit and the rest, in microseconds per step.",
        """
SELECT run, lane, sum(steps)::BIGINT AS steps, round(sum(busy_us) / sum(steps), 1) AS step_us,
  round(sum(draft_us) / sum(steps), 1) AS draft_us, round(sum(device_us) / sum(steps), 1) AS device_us,
  round(sum(commit_us) / sum(steps), 1) AS commit_us,
  round((sum(busy_us)::DOUBLE - sum(draft_us) - sum(device_us) - sum(commit_us)) / sum(steps), 1) AS other_us
FROM step_rollup GROUP BY run, lane ORDER BY run, lane
""",
    ),
    _view(
        "request_tokens_by_lane",
        "Which lane produced how many tokens of each request.",
        """
SELECT l.run, k.request_id, l.lane, l.steps, l.tokens, round(l.tokens / nullif(l.steps, 0), 3) AS tokens_per_step
FROM request_lanes l JOIN request_keys k USING (request_no) ORDER BY l.run, l.request_no, l.lane
""",
    ),
    _view(
        "finish_reasons",
        "How requests ended.",
        """
SELECT run, reason, count(*) AS requests, sum(output_tokens)::BIGINT AS output_tokens,
  any_value(nullif(error, '')) AS an_error
FROM requests GROUP BY run, reason ORDER BY run, requests DESC
""",
    ),
    _view(
        "conversations",
        "Prompts and replies of the requests that ran while `record_content` was on.",
        """
SELECT c.run, c.time, r.conversation_id, c.request_id, c.prompt, c.reply, r.reason, r.prompt_tokens, r.output_tokens
FROM contents c LEFT JOIN requests r USING (run, request_id) ORDER BY c.run, c.time
""",
    ),
    _view(
        "kv_over_time",
        "KV blocks in use and the deepest sequence, by second.",
        """
SELECT run, second, max(kv_used_max) AS kv_used, max(kv_total) AS kv_total,
  round(max(kv_used_max) / nullif(max(kv_total), 0), 4) AS share, max(depth_max) AS depth
FROM step_rollup GROUP BY run, second ORDER BY run, second
""",
    ),
    _view(
        "width_effect",
        "Tokens per busy second and per step by lane and width bucket.",
        """
SELECT run, width_bucket, lane, sum(steps)::BIGINT AS steps, round(sum(emitted) / sum(steps), 3) AS tokens_per_step,
  round(sum(emitted) / greatest(sum(busy_us), 1) * 1e6, 1) AS tokens_per_busy_s,
  round(sum(busy_us) / sum(steps) / 1000, 3) AS step_ms
FROM step_rollup GROUP BY run, width_bucket, lane ORDER BY run, width_bucket, lane
""",
    ),
    _view(
        "overhead",
        "What telemetry cost the engine: share of tick time spent on recording, and what the writer needed.",
        """
SELECT r.run, r.run_id, h.recording_share, h.recorded, h.lost_in_ring, f.committed, f.flushes, f.write_ms_per_flush,
  f.encode_us_per_record
FROM runs r
LEFT JOIN (SELECT run, round(sum(recording_us) / nullif(sum(tick_us), 0), 5) AS recording_share,
    max(records) AS recorded, max(lost) AS lost_in_ring FROM health GROUP BY run) h USING (run)
LEFT JOIN (SELECT run, sum(records)::BIGINT AS committed, count(*) AS flushes,
    round(avg(write_us) / 1000, 2) AS write_ms_per_flush,
    round(sum(encode_us) / nullif(sum(records), 0), 2) AS encode_us_per_record FROM flushes GROUP BY run) f USING (run)
ORDER BY r.run
""",
    ),
    _view(
        "losses_by_kind",
        "What telemetry was dropped, by kind, and when that was noticed first and last.",
        """
SELECT run, kind, sum(lost)::BIGINT AS lost, min(time) AS first_noticed, max(time) AS last_noticed
FROM losses GROUP BY run, kind ORDER BY run, lost DESC
""",
    ),
    _view(
        "run_list",
        "All runs of this file: model, device, how long, how it ended, and what is missing.",
        """
SELECT run, run_id, state, end_reason, started, coalesce(ended, last_record, heartbeat) AS until, model, device, dtype,
  records, missing, gap_ms FROM runs ORDER BY run DESC
""",
    ),
)

STRUCTURE: tuple[View, ...] = (
    _view(
        "step_sequences",
        "What one request gave to and got from one step.",
        """
SELECT s.run, s.step_id, s.lane, k.request_id, s.request_no, s.share.drafted AS drafted,
  s.share.accepted AS accepted, s.share.emitted AS emitted, s.share.prefill_tokens AS prefill_tokens
FROM (SELECT l.run, l.step_id, l.lane, unnest(l.shares) AS share, unnest(b.requests) AS request_no
  FROM lane_steps l JOIN batches b USING (batch_no)) s
JOIN request_keys k USING (request_no)
""",
    ),
    _view(
        "spans",
        "Everything as OpenTelemetry spans: recorded ones, and one for each run, lane step and gate decision.",
        _SPANS,
    ),
)

VIEW_NAMES = tuple(view.name for view in VIEWS)


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Put the views of this version into the file, so that any DuckDB client sees them."""
    connection.execute("BEGIN")
    for view in (*STRUCTURE, *VIEWS):
        connection.execute(f"CREATE OR REPLACE VIEW {view.name} AS {view.sql}")
        connection.execute(f"COMMENT ON VIEW {view.name} IS '{_digest(view)}'")
    connection.execute("COMMIT")


def has_views(connection: duckdb.DuckDBPyConnection) -> bool:
    """The file has every view as this version defines it."""
    rows = connection.execute("SELECT view_name, comment FROM duckdb_views() WHERE NOT internal").fetchall()
    found = dict(rows)
    return all(found.get(view.name) == _digest(view) for view in (*STRUCTURE, *VIEWS))


def _digest(view: View) -> str:
    return hashlib.sha256(view.sql.encode()).hexdigest()[:16]
