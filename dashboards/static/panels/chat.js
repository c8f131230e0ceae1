// Chat: streamed replies as text or as tokens with their provenance, and the live figures and levers beside it.

import { h, list, roving, show, text } from "../dom.js";
import { conversation, running } from "../state.js";
import { createBeside } from "./beside.js";
import { createComposer } from "./composer.js";
import { createInspector, createLegend } from "./provenance.js";
import { createTurn, updateTurn } from "./turn.js";

const NEAR_END_PX = 40;
const SPOKEN = 400;

export function createChat(shared) {
  const { words, now, getState, actions, apply, onView, say } = shared;
  let isProvenance = false;
  let isFollowing = true;
  const inspector = createInspector(words, getState);
  const legend = createLegend(words);
  const beside = createBeside(shared);
  const composer = createComposer({ onSend: ask, onStop: stop, onProvenance: toggleProvenance, onNew: startAfresh });
  const announce = createAnnouncer(words);
  const log = h("div", {
    class: "turns",
    role: "log",
    "aria-label": "Conversation",
    "aria-live": "off",
    tabindex: "0",
  });
  const empty = h("p", {
    class: "empty",
    text: "Ask something. While the reply streams, flip a lever beside it and watch the speed.",
  });
  const events = { onCopy: copyText, onAgain: regenerate };

  log.addEventListener("scroll", () => {
    isFollowing = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  });
  roving(log, ".tok", { onFocus: (element) => inspector.show(element) });
  log.addEventListener("pointerover", (event) => {
    const element = event.target.closest?.(".tok");
    if (element) inspector.show(element);
  });

  function stop() {
    for (const turn of running(getState())) actions.stopRequest(turn.id);
  }

  function startAfresh() {
    apply({ type: "chat_cleared" });
  }

  function ask(content) {
    if (running(getState()).length) {
      say("A reply is still running: stop it first (Esc).");
      return false;
    }
    isFollowing = true;
    const { settings } = composer;
    return actions.startReply(content, conversation(getState(), settings.system()), settings.options());
  }

  function regenerate(id) {
    const { turns } = getState();
    const question = turns[turns.findIndex((turn) => turn.id === id) - 1];
    if (!question) return;
    apply({ type: "turns_dropped", from: question.id });
    ask(question.text);
  }

  function copyText(id) {
    const turn = getState().turns.find((entry) => entry.id === id);
    if (!navigator.clipboard) return say("Copying needs a secure address (https or localhost).");
    const copied = navigator.clipboard.writeText(turn.text);
    return copied.then(() => say("Copied.")).catch(() => say("The browser did not allow copying."));
  }

  function toggleProvenance() {
    isProvenance = !isProvenance;
    onView();
  }

  function render(state) {
    const view = { words, at: now(), isProvenance };
    show(empty, !state.turns.length);
    list(
      log,
      state.turns,
      (turn) => turn.id,
      (turn) => createTurn(turn, events),
      (element, turn) => updateTurn(element, turn, view),
    );
    composer.update(state, { isRunning: running(state).length > 0, isProvenance });
    show(legend.element, isProvenance);
    show(inspector.element, isProvenance);
    if (isProvenance) legend.update(state.turns);
    announce.update(state.turns.at(-1));
    beside.render(state);
    if (isFollowing) log.scrollTop = log.scrollHeight;
  }

  const side = [legend.element, inspector.element, beside.element];
  return {
    element: h(
      "div",
      { class: "chat" },
      h("div", { class: "chat-main" }, empty, log, announce.element, composer.element),
      h("aside", { class: "chat-side", "aria-label": "Beside the chat" }, side),
    ),
    render,
    repaint: beside.repaint,
    stop,
    toggleProvenance,
    focus: composer.focus,
    isInteractive: true,
  };
}

/** Tells a screen reader that a reply began and how it ended; every token would be too much. */
function createAnnouncer(words) {
  const element = h("p", { class: "hidden", role: "status" });
  let last = "";
  return {
    element,
    update(turn) {
      const status = turn ? `${turn.id} ${turn.status}` : "";
      if (status === last) return;
      last = status;
      if (turn?.status === "streaming") text(element, "The reply has begun.");
      else if (turn?.role === "assistant" && turn.status === "done") {
        text(element, `Reply ${words.finishes[turn.reason] ?? turn.reason}: ${turn.text.slice(0, SPOKEN)}`);
      }
    },
  };
}
