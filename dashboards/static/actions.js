// What a person asks for, as messages to the server; nothing is shown as done before the server says so.

const NOT_SENT = "Not sent: there is no connection.";

/** `apply` hands a message to the reducer, `say` shows a sentence, `forgetPast` clears the charts of a replay. */
export class Actions {
  constructor({ wire, apply, say, getState, forgetPast }) {
    Object.assign(this, { wire, apply, say, getState, forgetPast });
    this.prefix = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
    this.count = 0;
  }

  askLever(name, value, more) {
    const change_id = this.#id("lever");
    const expected = this.getState().levers.find((lever) => lever.name === name)?.value ?? null;
    this.apply({ type: "lever_asked", change_id, name, value, kind: "set" });
    const isSent = this.wire.send({ type: "set_lever", change_id, name, value, expected, ...more });
    if (!isSent) this.#leverNotSent(change_id, name);
  }

  undoLever(of, name) {
    const change_id = this.#id("undo");
    this.apply({ type: "lever_asked", change_id, name, value: null, kind: "undo" });
    if (!this.wire.send({ type: "undo_lever", change_id, of })) this.#leverNotSent(change_id, name);
  }

  undoLast() {
    const { events, role } = this.getState();
    const event = events.at(-1);
    if (!event) this.say("No lever was changed since this page connected.");
    else if (role === "read") this.say("This access may read, not change anything.");
    else this.undoLever(event.change_id, event.name);
  }

  /** True when the question left. */
  startReply(content, before, options) {
    const request_id = this.#id("chat");
    const messages = [...before, { role: "user", content }];
    const chat = { type: "chat", request_id, messages, conversation_id: `web-${this.prefix}`, ...options };
    const isSent = this.wire.send(chat);
    if (isSent) this.apply({ type: "asked", request_id, content });
    else this.say(NOT_SENT);
    return isSent;
  }

  stopRequest(request_id) {
    if (this.wire.send({ type: "stop", request_id })) this.apply({ type: "stop_asked", request_id });
    else this.say(NOT_SENT);
  }

  runQuery(sql, purpose, max_rows) {
    const query_id = this.#id("query");
    this.apply({ type: "query_asked", query_id, sql, purpose });
    const isSent = this.wire.send({ type: "query", query_id, sql, max_rows });
    if (!isSent) this.apply({ type: "query_result", query_id, error: NOT_SENT });
  }

  controlReplay({ duration = 0, speed = 1, position = 0, ...message }) {
    if (!this.wire.send({ type: "replay", speed, position, ...message })) return this.say(NOT_SENT);
    if (message.action === "start") this.forgetPast();
    return this.apply({ type: "replay_asked", duration, speed, position, ...message });
  }

  #leverNotSent(change_id, name) {
    this.apply({ type: "lever_refused", change_id, name, message: `${NOT_SENT} Nothing was changed.` });
  }

  #id(word) {
    this.count += 1;
    return `web-${word}-${this.prefix}-${this.count}`;
  }
}
