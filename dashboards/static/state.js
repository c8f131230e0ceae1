// What the page knows, and how each message changes it: a pure reducer without clock, socket or document.

export const WIRE_VERSION = 1;
const STALE_AFTER_S = 3;
const RECENT_S = 30;
const REPLAY_SLACK_S = 60;
const KEEP = { recent: 400, log: 400, events: 200, gate: 100, turns: 200 };

export const initial = Object.freeze({
  link: { status: "connecting", attempt: 0, retryAt: 0, message: "", session: "", ever: false },
  engine: { state: "unknown", stage: "", done: 0, total: 0, unit: "bytes", message: "" },
  facts: null,
  role: "",
  levers: [],
  pending: {},
  refusals: {},
  events: [],
  stats: null,
  statsAt: 0,
  recent: [],
  totals: { lanes: {}, skipped: 0, frames: 0, since: 0 },
  gate: null,
  gateAt: 0,
  gateLog: [],
  requests: [],
  requestsAt: 0,
  log: [],
  problem: null,
  turns: [],
  spelled: {},
  queries: {},
  replay: null,
  paused: false,
  pausedAt: 0,
});

const last = (list, keep) => (list.length > keep ? list.slice(list.length - keep) : list);

/** The next state. `at` is local time in seconds, given by the caller. */
export function reduce(state, message, at = 0) {
  const handler = HANDLERS[message.type];
  return handler ? handler(state, message, at) : state;
}

const HANDLERS = {
  // ---- the connection
  link: (state, { type, ...link }) => ({
    ...state,
    link: { ...state.link, ...link },
  }),
  welcome: (state, message, at) => {
    const sameSession = state.link.session === message.session;
    return {
      ...state,
      link: { ...state.link, status: "open", attempt: 0, message: "", session: message.session, ever: true },
      engine: { ...state.engine, state: message.state },
      role: message.role,
      facts: message.facts ?? null,
      levers: message.levers,
      pending: {},
      turns: sameSession ? state.turns : state.turns.map(cutOff),
      totals: state.totals.since ? state.totals : { ...state.totals, since: at },
    };
  },
  load: (state, message) => ({
    ...state,
    facts: message.facts ?? state.facts,
    engine: {
      state: message.state,
      stage: message.stage ?? "",
      done: message.done ?? 0,
      total: message.total ?? 0,
      unit: message.unit ?? "bytes",
      message: message.message ?? "",
    },
  }),
  problem: (state, message, at) => ({
    ...state,
    problem: { message: message.message, at },
    replay: state.stats === null ? null : state.replay, // the answer to a replay that cannot start
    turns: message.request_id
      ? change(state.turns, message.request_id, (turn) => refusedOrLost(turn, message.message))
      : state.turns,
  }),

  // ---- live figures
  stats: (state, message, at) => {
    const replaying = Boolean(message.replay_run);
    if (state.replay && !replaying) return state;
    if (replaying && !state.replay) return state;
    return {
      ...state,
      stats: message,
      statsAt: at,
      recent: withFrame(state.recent, message),
      totals: replaying ? state.totals : addTotals(state.totals, message),
      replay: replaying ? { ...state.replay, position: message.replay_position ?? 0 } : null,
    };
  },
  gate: (state, message, at) => {
    if (!isOfThisTime(state, message)) return state;
    const before = state.gateLog[state.gateLog.length - 1];
    const isNews =
      !before || before.reason !== message.reason || before.arm !== message.arm || before.mode !== message.mode;
    return {
      ...state,
      gate: message,
      gateAt: at,
      gateLog: isNews ? last([...state.gateLog, message], KEEP.gate) : state.gateLog,
    };
  },
  requests: (state, message, at) =>
    isOfThisTime(state, message) ? { ...state, requests: message.rows, requestsAt: at } : state,
  log: (state, message) => ({ ...state, log: last([...state.log, message], KEEP.log) }),

  // ---- levers
  lever_asked: (state, { change_id, name, value, kind }, at) => ({
    ...state,
    pending: { ...state.pending, [change_id]: { name, value, kind, at } },
    refusals: without(state.refusals, name),
  }),
  lever_event: (state, message) => ({
    ...state,
    levers: state.levers.map((lever) =>
      lever.name === message.name ? { ...lever, value: message.new, source: "operator" } : lever,
    ),
    pending: without(state.pending, message.change_id),
    refusals: without(state.refusals, message.name),
    events: last([...state.events.filter((event) => event.change_id !== message.change_id), message], KEEP.events),
  }),
  lever_refused: (state, message, at) => ({
    ...state,
    pending: without(state.pending, message.change_id),
    refusals: { ...state.refusals, [message.name]: { message: message.message, at } },
    levers:
      message.current === undefined || message.current === null
        ? state.levers
        : state.levers.map((lever) => (lever.name === message.name ? { ...lever, value: message.current } : lever)),
  }),

  // ---- chat
  asked: (state, { request_id, content }, at) => ({
    ...state,
    turns: last(
      [
        ...state.turns,
        { id: `${request_id}-you`, role: "user", text: content, status: "done", tokens: [] },
        { id: request_id, role: "assistant", text: "", status: "sent", tokens: [], startedAt: at, firstAt: 0 },
      ],
      KEEP.turns,
    ),
  }),
  queued: (state, message) => ({
    ...state,
    turns: change(state.turns, message.request_id, (turn) => ({
      ...turn,
      status: "queued",
      promptTokens: message.prompt_tokens,
      maxContext: message.max_context,
    })),
  }),
  delta: (state, message, at) => ({
    ...state,
    spelled: message.spelled ? { ...state.spelled, ...message.spelled } : state.spelled,
    turns: change(state.turns, message.request_id, (turn) => ({
      ...turn,
      status: turn.status === "stopping" ? "stopping" : "streaming",
      text: turn.text + spoken(message),
      tokens: turn.tokens.concat(message.tokens.map((array) => ({ ...token(array), gate: state.gate }))),
      firstAt: turn.firstAt || at,
      lastAt: at,
    })),
  }),
  done: (state, message, at) => ({
    ...state,
    turns: change(state.turns, message.request_id, (turn) => ({
      ...turn,
      status: "done",
      text: turn.text + (message.text ?? ""),
      tail: message.text ?? "",
      reason: message.reason,
      usage: message.usage ?? {},
      error: message.error ?? "",
      speedup: message.speedup ?? null,
      lastAt: at,
    })),
  }),
  stop_asked: (state, { request_id }) => ({
    ...state,
    turns: change(state.turns, request_id, (turn) => ({ ...turn, status: "stopping" })),
  }),
  not_sent: (state, { request_id }) => ({
    ...state,
    turns: change(state.turns, request_id, (turn) => ({
      ...turn,
      status: "refused",
      error: "Not sent: there is no connection.",
    })),
  }),
  chat_cleared: (state) => ({ ...state, turns: state.turns.filter((turn) => isRunning(turn)) }),
  turns_dropped: (state, { from }) => {
    const index = state.turns.findIndex((turn) => turn.id === from);
    return index < 0 ? state : { ...state, turns: state.turns.slice(0, index) };
  },

  // ---- SQL, replay, pause
  query_asked: (state, { query_id, sql, purpose }) => ({
    ...state,
    queries: { ...state.queries, [purpose]: { id: query_id, sql, result: null } },
  }),
  query_result: (state, message) => {
    const purpose = Object.keys(state.queries).find((key) => state.queries[key].id === message.query_id);
    if (!purpose) return state;
    return {
      ...state,
      queries: { ...state.queries, [purpose]: { ...state.queries[purpose], result: filled(message) } },
    };
  },
  replay_asked: (state, { run, action, speed, position, duration, startedAt }) => {
    if (action === "stop") return { ...state, replay: null, stats: null, recent: [], gate: null, requests: [] };
    if (action === "start") {
      const replay = { run, status: "running", speed, position, duration, startedAt };
      return { ...state, replay, stats: null, recent: [], gate: null, requests: [] };
    }
    if (!state.replay) return state;
    const status = action === "pause" ? "paused" : action === "resume" ? "running" : state.replay.status;
    const next = { ...state.replay, status, speed };
    if (action === "seek") return { ...state, recent: [], replay: { ...next, position } };
    return { ...state, replay: next };
  },
  pause: (state, { on }, at) => ({ ...state, paused: on, pausedAt: on ? at : 0 }),
};

/** The frames of the last 30 s up to and with this one; those after it, before a seek backwards, go. */
function withFrame(frames, frame) {
  let first = Math.max(0, frames.length - KEEP.recent + 1);
  let end = frames.length;
  while (first < end && frames[first].time <= frame.time - RECENT_S) first += 1;
  while (end > first && frames[end - 1].time > frame.time) end -= 1;
  const kept = frames.slice(first, end);
  kept.push(frame);
  return kept;
}

function without(record, key) {
  if (!(key in record)) return record;
  const { [key]: _, ...rest } = record;
  return rest;
}

const isRunning = (turn) => ["sent", "queued", "streaming", "stopping"].includes(turn.status);

const cutOff = (turn) =>
  isRunning(turn)
    ? { ...turn, status: "done", reason: "lost", error: "The connection was lost; the reply ended here." }
    : turn;

/** The text of a delta: its tokens carry it, and `text` is the same again or empty. */
const spoken = (message) => message.tokens.map((array) => array[4] ?? "").join("") || message.text;

function refusedOrLost(turn, message) {
  if (turn.status === "sent" || turn.status === "queued") return { ...turn, status: "refused", error: message };
  return isRunning(turn) ? { ...turn, status: "done", reason: "lost", error: message } : turn;
}

/** While a replay runs, frames of the present do not belong on the screen; the wire marks only `stats`. */
const isOfThisTime = (state, message) =>
  !state.replay || (state.stats !== null && Math.abs(message.time - state.stats.time) < REPLAY_SLACK_S);

function change(turns, id, update) {
  const index = turns.findLastIndex((turn) => turn.id === id);
  return index < 0 ? turns : turns.with(index, update(turns[index]));
}

/** A token array of the wire by name. */
function token([id, lane, draft, step, text = "", logprob = null, top = [], rejected = []]) {
  return { id, lane, draft, step, text, logprob, top, rejected };
}

const filled = (message) => ({
  columns: message.columns ?? [],
  types: message.types ?? [],
  rows: message.rows ?? [],
  truncated: message.truncated ?? false,
  seconds: message.seconds ?? 0,
  error: message.error ?? "",
});

function addTotals(totals, stats) {
  return {
    ...totals,
    frames: totals.frames + 1,
    skipped: totals.skipped + (stats.skipped ?? 0),
    lanes: sumLanes([{ lanes: totals.lanes }, stats]),
  };
}

/** Lane aggregates of several frames added up. */
export function sumLanes(frames) {
  const sums = {};
  for (const frame of frames) for (const name in frame.lanes) addLane((sums[name] ??= noWork()), frame.lanes[name]);
  return sums;
}

const COUNTS = ["steps", "tokens", "seconds", "drafted", "accepted"];
const BY_POSITION = ["drafted_at", "accepted_at"];

const noWork = () => ({ steps: 0, tokens: 0, seconds: 0, drafted: 0, accepted: 0, drafted_at: [], accepted_at: [] });

function addLane(sum, lane) {
  for (const name of COUNTS) sum[name] += lane[name] ?? 0;
  for (const name of BY_POSITION)
    for (let index = 0; index < (lane[name]?.length ?? 0); index += 1)
      sum[name][index] = (sum[name][index] ?? 0) + lane[name][index];
}

// ---- questions to the state -------------------------------------------------------------------------------

/** Mean rates over the last `seconds` of frames. */
export function rates(state, seconds) {
  const end = state.stats?.time ?? 0;
  let tokens = 0;
  let prefill = 0;
  let covered = 0;
  for (let index = state.recent.length - 1; index >= 0; index -= 1) {
    const frame = state.recent[index];
    if (frame.time <= end - seconds) break;
    tokens += frame.tokens_per_s * frame.window_s;
    prefill += frame.prefill_tokens_per_s * frame.window_s;
    covered += frame.window_s;
  }
  return covered
    ? { tokens: tokens / covered, prefill: prefill / covered, covered }
    : { tokens: null, prefill: null, covered: 0 };
}

/** One word for what the page can be trusted to show: connecting, disconnected, refused, loading, failed, stale, live. */
export function condition(state, at) {
  const { link, engine } = state;
  if (link.status === "refused" || link.status === "incompatible") return "refused";
  if (link.status !== "open") return link.ever ? "disconnected" : "connecting";
  if (engine.state === "failed") return "failed";
  if (engine.state !== "ready") return "loading";
  if (state.replay) return "replay";
  if (!state.stats) return "empty";
  return at - state.statsAt > STALE_AFTER_S ? "stale" : "live";
}

/** Whether what is asked for now could be carried out. */
export const mayControl = (state) => state.role !== "read" && state.link.status === "open" && !state.replay;

/** An arm may carry its number of drafts: `mtp:2` is the arm `mtp`. */
export const isSameArm = (left, right) => left.split(":")[0] === right.split(":")[0];

export const lever = (state, name) => state.levers.find((entry) => entry.name === name);

export const pendingFor = (state, name) => Object.values(state.pending).findLast((entry) => entry.name === name);

export const running = (state) => state.turns.filter(isRunning);

/** Tokens held of each reply under way, so that a resumed connection sends only what is missing. */
export const received = (state) => Object.fromEntries(running(state).map((turn) => [turn.id, turn.tokens.length]));

/** What the next chat message must carry so that the model sees the conversation so far. */
export function conversation(state, system) {
  const spoken = state.turns.filter((turn) => turn.text && turn.status !== "refused");
  const turns = spoken.map((turn) => ({ role: turn.role, content: turn.text }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}
