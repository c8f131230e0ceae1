// The connection: hello and welcome, version check, resume, heartbeat, and coming back with growing pauses.

import { WIRE_VERSION } from "./state.js";

const FIRST_PAUSE_S = 0.5;
const LONGEST_PAUSE_S = 15;
const SILENCE_S = 10;
const TOPICS = ["stats", "requests", "levers", "gate", "log"];

export class Wire {
  /**
   * `onMessage(message)` gets every server message; `onLink(change)` gets `{status, attempt, retryAt, message}`.
   * `received()` counts the tokens held of each running reply; `clock()` is seconds; socket class and timers can be replaced by a test.
   */
  constructor({
    url,
    token,
    rate = 10,
    onMessage,
    onLink,
    received = () => ({}),
    clock,
    Socket = globalThis.WebSocket,
    later = (run, ms) => setTimeout(run, ms),
    cancel = (timer) => clearTimeout(timer),
  }) {
    Object.assign(this, { url, token, rate, onMessage, onLink, received, clock, Socket, later, cancel });
    this.session = "";
    this.attempt = 0;
    this.socket = null;
    this.timer = null;
    this.heard = 0;
    this.isOpen = false;
    this.isFinal = false;
  }

  connect() {
    this.cancel(this.timer);
    this.isFinal = false;
    this.#drop();
    this.onLink({ status: "connecting", attempt: this.attempt });
    const socket = new this.Socket(this.url);
    this.socket = socket;
    socket.onopen = () => this.#greet(socket);
    socket.onmessage = (event) => socket === this.socket && this.#take(event.data);
    socket.onclose = () =>
      socket === this.socket && this.#lost("The server closed the connection or cannot be reached.");
    socket.onerror = () => {};
    this.heard = this.clock();
    this.#watch();
  }

  /** True when the message left; a screen must not show as sent what did not. */
  send(message) {
    if (!this.isOpen || this.socket.readyState !== 1) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  /** Try at once instead of waiting for the pause to end. */
  retry() {
    this.attempt = 0;
    this.connect();
  }

  #greet(socket) {
    const hello = { type: "hello", version: WIRE_VERSION, client: "web", token: this.token(), resume: this.session };
    if (this.session) hello.received = this.received();
    socket.send(JSON.stringify(hello));
  }

  #take(data) {
    this.heard = this.clock();
    let message;
    try {
      message = JSON.parse(data);
    } catch {
      return;
    }
    if (message.type === "refused") this.#end("refused", message.message);
    else if (message.type === "welcome") this.#welcome(message);
    else if (this.isOpen) this.onMessage(message);
  }

  #welcome(message) {
    if (message.version !== WIRE_VERSION) {
      const text = `This page speaks wire version ${WIRE_VERSION}, the server ${message.version}: reload the page.`;
      return this.#end("incompatible", text);
    }
    this.session = message.session;
    this.attempt = 0;
    this.isOpen = true;
    this.onMessage(message);
    return this.send({ type: "subscribe", topics: TOPICS, rate_hz: this.rate });
  }

  /** The server said no: coming back by itself would not help. */
  #end(status, message) {
    this.isFinal = true;
    this.#drop();
    this.cancel(this.timer);
    this.onLink({ status, message });
  }

  #lost(message) {
    this.#drop();
    this.cancel(this.timer);
    if (this.isFinal) return;
    const pause = Math.min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** this.attempt) * (0.75 + Math.random() / 2);
    this.attempt += 1;
    this.onLink({ status: "waiting", attempt: this.attempt, retryAt: this.clock() + pause, message });
    this.timer = this.later(() => this.connect(), pause * 1000);
  }

  /** Ping on silence; a server that does not answer is gone even if the socket does not know yet. */
  #watch() {
    this.timer = this.later(() => {
      const silence = this.clock() - this.heard;
      if (silence > SILENCE_S) return this.#lost("The server has not answered for 10 s.");
      if (silence > SILENCE_S / 2) this.send({ type: "ping", nonce: String(Math.floor(this.clock())) });
      return this.#watch();
    }, 1000);
  }

  #drop() {
    const socket = this.socket;
    this.socket = null;
    this.isOpen = false;
    if (socket) {
      socket.onclose = null;
      socket.onmessage = null;
      socket.close();
    }
  }
}
