"""What the database holds, in words: one sentence per table, units per column, and the named enums."""

from __future__ import annotations

from telemetry.names import Finish, GateReason, Lane

SCHEMA_VERSION = 2
"""Raised with every migration; a file of any older version opens and is migrated."""

OTHER = "other"
"""Enum value of a word that this version does not know: nothing is dropped because of its name."""

LANES = (*(lane.value for lane in Lane), OTHER)
K_REASONS = ("", "num_drafts", "ladder", "adaptive", "capacity", "confidence", "match", "grammar", "gate", OTHER)
GATE_REASONS = (*(reason.value for reason in GateReason), OTHER)
FINISHES = (*(finish.value for finish in Finish), OTHER)

SPECULATIVE = (Lane.NGRAM.value, Lane.SELF_SPEC.value, Lane.MTP.value, Lane.DFLASH.value)
DECODE = (*SPECULATIVE, Lane.MIXED.value, Lane.PLAIN.value, Lane.PIPELINED.value)

TABLES: dict[str, str] = {
    "runs": "One engine run: what ran, from when to when, how it ended and what is missing.",
    "requests": "One request that ended: times by phase, tokens, drafts, finish reason.",
    "request_lanes": "Steps and tokens of a request by lane.",
    "request_keys": "The number of a request in this file.",
    "batches": "A set of requests that ran together, in the order of `lane_steps.shares`, with their spans as links.",
    "lane_steps": "One lane step: width, rows, drafts, acceptance, K and why, refusals, KV, host time by part.",
    "gate_decisions": "One decision of the gate, with the state of every arm.",
    "lever_changes": "One change of a lever, also a refused one (`error`).",
    "tokens": "One emitted token (trace level 3): lane, draft position, log probability.",
    "contents": "Prompt (JSON: messages, text or token ids) and reply of a request; only while `record_content` is on.",
    "loads": "One stage of start-up: how long, how many bytes.",
    "rungs": "The width decision flipped between speculating and not.",
    "shadow_checks": "A verify step that was re-run row by row, and how many rows differed.",
    "health": "The engine's own accounting, once a second.",
    "metrics": "Samples of the Prometheus metrics of the server.",
    "losses": "Telemetry that was dropped, by kind, where it was noticed.",
    "flushes": "One batch that the writer committed, and what that cost.",
    "spans_recorded": "Spans that came through the OpenTelemetry SDK: loads and levers (`spans` composes the others).",
    "step_rollup": "Steps summed by second, lane and width bucket.",
    "position_rollup": "Drafts and acceptances summed by second, lane and draft position.",
    "refusal_rollup": "Steps summed by second, the lane taken, and the lane refused with its reason.",
    "gate_rollup": "Gate decisions summed by second, mode, arm and reason.",
    "step_time_rollup": "Steps counted by minute, lane and duration bucket (eighths of a power of two, microseconds).",
    "schema_version": "The migrations that this file went through.",
}

LANE_CODES = {word: code for code, word in enumerate(LANES)}
K_CODES = {word: code for code, word in enumerate(K_REASONS)}
GATE_CODES = {word: code for code, word in enumerate(GATE_REASONS)}
