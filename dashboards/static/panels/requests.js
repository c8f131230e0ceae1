// Requests: running ones and the last that ended, sortable, filterable, cancellable.

import { attr, h, list, show, text } from "../dom.js";
import { age, count, number, percent, span } from "../format.js";

const COLUMNS = [
  ["request_id", "Request", (row) => row.request_id, "left"],
  ["state", "State", (row) => (row.state === "finished" && row.reason ? row.reason : row.state), "left"],
  ["lane", "Lane", (row) => row.lane || "–", "left"],
  ["age_s", "Age", (row) => span(row.age_s)],
  ["prompt_tokens", "Prompt, tok", (row) => count(row.prompt_tokens)],
  ["output_tokens", "Output, tok", (row) => count(row.output_tokens)],
  ["tokens_per_s", "Speed, tok/s", (row) => number(row.tokens_per_s ?? 0)],
  ["ttft_ms", "TTFT, ms", (row) => number(row.ttft_ms)],
  ["drafted", "Drafted", (row) => count(row.drafted ?? 0)],
  ["accepted", "Accepted, %", (row) => percent(row.drafted ? (row.accepted ?? 0) / row.drafted : null)],
];

const sortValue = (row, key) =>
  key === "accepted" ? (row.drafted ? (row.accepted ?? 0) / row.drafted : -1) : (row[key] ?? -1);

export function sorted(rows, key, isDescending) {
  const sign = isDescending ? -1 : 1;
  return [...rows].sort((left, right) => {
    const [a, b] = [sortValue(left, key), sortValue(right, key)];
    const order = typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b;
    return sign * order || left.request_id.localeCompare(right.request_id);
  });
}

export function createRequests({ actions, onView, mayControl }) {
  let key = "age_s";
  let isDescending = false;
  let filter = "";
  let onlyRunning = false;
  const heads = COLUMNS.map(([name, label, , side]) =>
    h(
      "th",
      { scope: "col", class: side ?? "right", "data-key": name },
      h("button", { type: "button", class: "sort", text: label, on: { click: () => sortBy(name) } }),
    ),
  );
  const body = h("tbody");
  const empty = h("p", { class: "empty" });
  const ageLine = h("p", { class: "age" });
  const search = h("input", {
    type: "search",
    id: "request-search",
    placeholder: "id, state, lane",
    autocomplete: "off",
    on: { input: () => filterBy(search.value) },
  });
  const running = h("input", {
    type: "checkbox",
    id: "request-running",
    on: { change: () => ((onlyRunning = running.checked), onView()) },
  });

  function sortBy(name) {
    isDescending = name === key ? !isDescending : name !== "request_id" && name !== "state" && name !== "lane";
    key = name;
    onView();
  }

  function filterBy(words) {
    filter = words.trim().toLowerCase();
    onView();
  }

  const matches = (row) =>
    (!onlyRunning || row.state !== "finished") &&
    (!filter ||
      `${row.request_id} ${row.state} ${row.lane ?? ""} ${row.reason ?? ""} ${row.conversation_id ?? ""}`
        .toLowerCase()
        .includes(filter));

  function make(row) {
    const cancel = h("button", {
      type: "button",
      class: "small",
      text: "Cancel",
      "aria-label": `Cancel ${row.request_id}`,
      on: { click: () => actions.stopRequest(row.request_id) },
    });
    return h(
      "tr",
      {},
      COLUMNS.map(([, , , side], index) =>
        h(index ? "td" : "th", { scope: index ? null : "row", class: side ?? "right" }),
      ),
      h("td", {}, cancel),
    );
  }

  function render(state, at) {
    for (const head of heads)
      attr(head, "aria-sort", head.dataset.key === key ? (isDescending ? "descending" : "ascending") : "none");
    const rows = sorted(state.requests.filter(matches), key, isDescending);
    show(empty, !rows.length);
    text(
      empty,
      state.requests.length
        ? "No request matches the filter."
        : "No request yet. Say something in the chat, or call the API.",
    );
    list(
      body,
      rows,
      (row) => row.request_id,
      make,
      (element, row) => {
        COLUMNS.forEach(([, , show_], index) => text(element.cells[index], show_(row)));
        attr(element, "data-state", row.state);
        const button = element.lastChild.firstChild;
        show(button, row.state !== "finished");
        button.disabled = !mayControl();
      },
    );
    text(
      ageLine,
      state.requestsAt
        ? `${rows.length} of ${state.requests.length} requests, updated ${age(at - state.requestsAt)}`
        : "",
    );
  }

  return {
    element: h(
      "div",
      {},
      h(
        "div",
        { class: "bar-row" },
        h("label", { class: "field", for: "request-search" }, h("span", { text: "Find" }), search),
        h("label", { class: "field", for: "request-running" }, running, h("span", { text: "running only" })),
        ageLine,
      ),
      h(
        "div",
        { class: "scroll card flush", tabindex: "0", role: "region", "aria-label": "Requests" },
        h(
          "table",
          { class: "grid wide" },
          h("caption", { class: "hidden", text: "Requests" }),
          h("thead", {}, h("tr", {}, heads, h("th", { scope: "col" }, h("span", { class: "hidden", text: "Cancel" })))),
          body,
        ),
      ),
      empty,
    ),
    render,
    everyMs: 250,
  };
}
