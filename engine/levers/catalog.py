"""Every lever, declared once; flags, environment, panels, schema and docs are derived from `LEVERS`."""

from __future__ import annotations

from typing import Final

from engine.levers.spec import Applies, Kind, Lever, LeverError


def parse_ladder(text: str) -> tuple[tuple[int, int], ...]:
    """`width:drafts,...` as pairs with rising widths, e.g. `4:3,8:3,16:1`. Raises `LeverError`."""
    rungs = tuple((int(width), int(drafts)) for width, drafts in (rung.split(":") for rung in text.split(",")))
    widths = [width for width, _ in rungs]
    if widths != sorted(set(widths)) or widths[0] < 1 or any(not 0 <= drafts <= 15 for _, drafts in rungs):
        raise LeverError(f"k_ladder cannot be {text!r}: widths must rise from 1 and drafts be 0 to 15.")
    return rungs


def _check_ladder(text: str) -> None:
    parse_ladder(text)


def _bool(name: str, env: str, default: bool, group: str, help: str, **more: object) -> Lever:
    return Lever(name, f"METRALE_{env}", Kind.BOOL, default, help, group, **more)  # type: ignore[arg-type]


def _int(name: str, env: str, low: int, high: int, default: int, group: str, help: str, **more: object) -> Lever:
    return Lever(
        name,
        f"METRALE_{env}",
        Kind.INT,
        default,
        help,
        group,
        minimum=low,
        maximum=high,
        **more,  # type: ignore[arg-type]
    )


def _float(
    name: str, env: str, low: float, high: float, default: float, group: str, help: str, **more: object
) -> Lever:
    return Lever(
        name,
        f"METRALE_{env}",
        Kind.FLOAT,
        default,
        help,
        group,
        minimum=low,
        maximum=high,
        **more,  # type: ignore[arg-type]
    )


def _choice(name: str, env: str, choices: str, default: str, group: str, help: str, **more: object) -> Lever:
    options = tuple(choices.split())
    return Lever(name, f"METRALE_{env}", Kind.CHOICE, default, help, group, choices=options, **more)  # type: ignore[arg-type]


_SPEC, _GATE, _DFLASH, _NGRAM = "speculation", "gate", "dflash", "ngram"
_SCHED, _CAP, _OUT, _OBS = "scheduling", "capacity", "output", "observation"

_ALL: Final = (
    _choice("drafter", "DRAFTER", "off ngram self mtp dflash combined auto", "auto", _SPEC,
            "Which drafter feeds the decode lane; combined takes n-gram copies where they promise more accepted drafts"
            " than the MTP head, auto whatever promises the most tokens a second among all that are loaded."),
    _int("num_drafts", "NUM_DRAFTS", 1, 15, 3, _SPEC, "Drafts per verify step at most.", unit="drafts"),
    _float("draft_conf_min", "MTP_DRAFT_CONF", 0, 1, 0.0, _SPEC, "Stop a draft chain below this confidence."),
    Lever("k_ladder", "METRALE_MTP_K_LADDER", Kind.TEXT, "4:3,8:3,16:1,32:1",
          "Most drafts by batch width: up to each width, that many drafts.", _SPEC,
          pattern=r"\d{1,3}:\d{1,2}(,\d{1,3}:\d{1,2})*", check=_check_ladder),
    _int("mtp_max_seqs", "MTP_MAX_SEQS", 1, 256, 32, _SPEC, "Widest batch that speculates.", unit="sequences"),
    _choice("mtp_gate", "MTP_GATE_FORCE", "auto force off", "auto", _GATE,
            "Measured gate, always speculate, or never speculate."),
    _int("gate_window", "MTP_GATE_WINDOW", 1, 1024, 16, _GATE, "Steps per throughput window.", unit="steps"),
    _int("gate_dwell", "MTP_GATE_DWELL", 1, 64, 2, _GATE, "Confirmed losses before the gate switches."),
    _float("gate_margin", "MTP_GATE_MARGIN", 0, 1, 0.05, _GATE,
           "Relative floor by which the other arm must win."),
    _int("gate_reprobe_tokens", "MTP_GATE_REPROBE_TOKENS", 1, 1_000_000, 256, _GATE,
         "In plain mode, tokens until speculation is probed again.", unit="tokens"),
    _int("gate_refresh_tokens", "MTP_GATE_REFRESH_TOKENS", 1, 1_000_000, 1024, _GATE,
         "In speculating mode, tokens (times the width bucket) until plain is measured again.", unit="tokens"),
    _int("spec_entry_pin_tokens", "SPEC_ENTRY_PIN", 0, 1024, 8, _GATE,
         "Answer tokens that always run the verify arm.", unit="tokens"),
    _int("dflash_resume_guard", "DFLASH_RESUME_GUARD", 0, 4096, 0, _SPEC,
         "Plain tokens after thinking closed before speculation resumes.", unit="tokens"),
    _bool("dflash_spec_think", "DFLASH_SPEC_THINK", False, _SPEC, "Speculate inside thinking, MTP and DFlash alike."),
    _bool("dflash_gate_pin_c2", "DFLASH_GATE_PIN_C2", True, _DFLASH,
          "Pin the gate to verify for DFlash at one or two sequences."),
    _bool("dflash_adaptive", "DFLASH_ADAPTIVE", False, _DFLASH, "Suspend drafting per sequence when it accepts little."),
    _float("dflash_adaptive_min", "DFLASH_ADAPTIVE_MIN", 0, 15, 2.0, _DFLASH,
           "Mean accepted of the last 12 steps below which a sequence is suspended.", unit="tokens/step"),
    _int("dflash_adaptive_reprobe", "DFLASH_ADAPTIVE_REPROBE", 1, 65536, 256, _DFLASH,
         "Tokens until a suspended sequence drafts again.", unit="tokens"),
    _int("ngram_min", "NGRAM_MIN", 1, 16, 2, _NGRAM, "Shortest suffix that may match.", unit="tokens"),
    _int("ngram_max", "NGRAM_MAX", 1, 64, 16, _NGRAM, "Longest suffix that is looked up.", unit="tokens"),
    _int("ngram_copy_max", "NGRAM_COPY_MAX", 1, 64, 16, _NGRAM, "Longest window copied as drafts.", unit="tokens"),
    _bool("pipelined_decode", "PIPELINED_DECODE", True, _SCHED, "Run one step ahead when the router allows it."),
    _bool("row_invariant", "ROW_INVARIANT", True, _SCHED,
          "Kernels whose row results do not depend on how many rows run together."),
    _bool("always_mixed", "ALWAYS_MIXED", True, _SCHED, "Fuse prefill chunks into decode steps."),
    _int("mixed_slice_tokens", "MIXED_SLICE_TOKENS", 0, 8192, -1, _SCHED,
         "Cap of a fused chunk; 0 is no cap, auto fills 2.75 times the usual gap between deliveries.", unit="tokens",
         none_word="auto"),
    _int("max_prefill_tokens", "MAX_PREFILL_TOKENS", 16, 8192, 512, _SCHED, "Prompt tokens per prefill chunk.", unit="tokens"),
    _int("admit_watermark", "KV_ADMIT_WATERMARK", 1, 1_000_000, -1, _SCHED,
         "Decode tokens reserved per request at admission; auto is the context length.", unit="tokens", none_word="auto"),
    _bool("prefix_cache", "PREFIX_CACHE", True, _SCHED, "Reuse the KV blocks of a prompt prefix seen before."),
    _int("prefix_cache_tokens", "PREFIX_CACHE_TOKENS", 0, 100_000_000, -1, _SCHED,
         "Tokens of ended requests kept for later prompts; auto is 16,384 on a CPU, on a GPU what the pool leaves.",
         unit="tokens", none_word="auto"),
    _choice("policy", "POLICY", "fifo slai", "fifo", _SCHED, "Order and pacing of prompts."),
    _int("tbt_deadline_ms", "TBT_DEADLINE_MS", 1, 60_000, 100, _SCHED,
         "With slai: no prefill while a reply has waited 80 % of this for its next token.", unit="ms"),
    _int("max_batch_size", "MAX_BATCH_SIZE", 1, 256, -1, _CAP, "Sequences decoded together.", unit="sequences",
         none_word="auto", applies=Applies.RESTART),
    _int("kv_tokens", "KV_TOKENS", 64, 100_000_000, -1, _CAP, "Tokens that the KV pool holds.", unit="tokens",
         none_word="auto", applies=Applies.RESTART),
    _float("swap_gb", "SWAP_GB", 0, 1024, 1.0, _CAP, "Host memory and disk together for spilled KV; 0 is off.", unit="GB",
           applies=Applies.RESTART),
    _bool("loop_watchdog", "CONTENT_LOOP_WATCHDOG", False, _OUT, "End an answer that repeats itself.", lossless=False),
    _int("think_budget", "THINK_BUDGET", 0, 1_000_000, -1, _OUT, "Thinking tokens before a forced close.", unit="tokens",
         none_word="none", applies=Applies.REQUEST, lossless=False),
    _bool("adaptive_sampling", "ADAPTIVE_SAMPLING", False, _OUT, "Sharper sampling in code, tool and structured zones.",
          applies=Applies.REQUEST, lossless=False),
    _bool("force_temp_zero", "FORCE_TEMP_ZERO", False, _OUT, "Raw argmax everywhere.", applies=Applies.REQUEST, lossless=False),
    _float("shadow_check", "SHADOW_CHECK", 0, 1, 0.0, _OBS,
           "Share of verify steps whose rows are re-run one by one and compared."),
    _int("trace_level", "TRACE_LEVEL", 0, 3, 2, _OBS, "0 off, 1 requests, 2 steps, 3 tokens."),
    _bool("record_content", "RECORD_CONTENT", False, _OBS, "Store prompts and replies in telemetry.", applies=Applies.REQUEST),
    _bool("read_only", "READ_ONLY", False, _OBS, "Refuse every lever change.", applies=Applies.RESTART),
)  # fmt: skip

LEVERS: Final[dict[str, Lever]] = {lever.name: lever for lever in _ALL}
