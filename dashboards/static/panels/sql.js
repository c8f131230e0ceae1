// SQL: named views, a query box, a result table or the sentence that says what was wrong.

import { h, list, show, text } from "../dom.js";
import { count, number } from "../format.js";

const VIEWS = "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal ORDER BY view_name";
const SHOWN = 500;

export function createSql({ actions, say }) {
  const past = [];
  let at = 0;
  let drawn = null;
  const input = h("textarea", {
    id: "sql-input",
    rows: "4",
    spellcheck: "false",
    autocomplete: "off",
    "aria-label": "SQL",
    "aria-describedby": "sql-keys",
    text: "SELECT * FROM requests LIMIT 20",
    on: { keydown: onKey },
  });
  const run = h("button", { type: "submit", class: "primary", text: "Run" });
  const copy = h("button", { type: "button", text: "Copy as CSV", on: { click: copyCsv } });
  const views = h("ul", { class: "plain views" });
  const noViews = h("p", { class: "empty" });
  const again = h("button", { type: "button", class: "link", text: "Ask again", on: { click: () => askViews() } });
  const status = h("p", { class: "quiet", role: "status" });
  const error = h("p", { class: "error", role: "alert" });
  const head = h("thead");
  const body = h("tbody");
  const table = h(
    "div",
    { class: "scroll card flush result", tabindex: "0", role: "region", "aria-label": "Result" },
    h("table", { class: "grid wide" }, h("caption", { class: "hidden", text: "Result" }), head, body),
  );

  const askViews = () => actions.runQuery(VIEWS, "views", 500);

  function onKey(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    }
    const isFirst = !input.value.slice(0, input.selectionStart).includes("\n");
    if (
      event.altKey &&
      (event.key === "ArrowUp" || event.key === "ArrowDown") &&
      past.length &&
      (isFirst || event.altKey)
    ) {
      event.preventDefault();
      at = Math.max(0, Math.min(past.length - 1, at + (event.key === "ArrowUp" ? -1 : 1)));
      input.value = past[at];
    }
  }

  function ask() {
    const sql = input.value.trim();
    if (!sql) return;
    if (past.at(-1) !== sql) past.push(sql);
    if (past.length > 100) past.shift();
    at = past.length;
    actions.runQuery(sql, "query", 1000);
  }

  function open(name) {
    input.value = `SELECT * FROM ${name} LIMIT 200`;
    ask();
  }

  function copyCsv() {
    if (!drawn?.columns.length) return;
    const quote = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const lines = [drawn.columns, ...drawn.rows].map((row) =>
      row.map((value) => quote(value === null ? "" : cell(value))).join(","),
    );
    navigator.clipboard?.writeText(lines.join("\n")).then(
      () => say("Copied."),
      () => say("The browser did not allow copying."),
    );
  }

  function draw(result) {
    drawn = result;
    fillTable(head, body, result, SHOWN);
  }

  function render(state) {
    run.disabled = state.link.status !== "open";
    const { query, views: asked } = state.queries;
    const found = asked?.result;
    const names = found && !found.error ? found.rows : [];
    list(
      views,
      names,
      ([name]) => name,
      ([name, comment]) =>
        h(
          "li",
          {},
          h("button", { type: "button", class: "link", text: name, on: { click: () => open(name) } }),
          /\s/.test(comment ?? "") && h("p", { class: "quiet", text: comment }),
        ),
    );
    show(noViews, !names.length);
    text(
      noViews,
      !asked
        ? "Asked when this opens."
        : !found
          ? "Asking for the views …"
          : found.error || "The database has no named views.",
    );
    show(again, Boolean(found) && !names.length);
    const result = query?.result;
    show(error, Boolean(result?.error));
    text(error, result?.error ?? "");
    const waiting = query && !result;
    text(
      status,
      waiting ? "Running …" : result && !result.error ? summary(result) : query ? "" : "No query has run yet.",
    );
    show(table, Boolean(result && !result.error && result.columns.length));
    if (result && !result.error && result !== drawn) draw(result);
    copy.disabled = !drawn?.columns.length;
  }

  return {
    element: h(
      "div",
      { class: "sql" },
      h(
        "section",
        { class: "card", "aria-label": "Named views" },
        h("h3", { text: "Named views" }),
        views,
        noViews,
        again,
      ),
      h(
        "div",
        { class: "stack" },
        h(
          "form",
          { class: "composer", on: { submit: (event) => (event.preventDefault(), ask()) } },
          input,
          h(
            "div",
            { class: "buttons" },
            run,
            copy,
            h("p", { id: "sql-keys", class: "quiet", text: "Ctrl+Enter runs, Alt+↑ and Alt+↓ recall; read-only" }),
          ),
        ),
        status,
        error,
        table,
      ),
    ),
    render,
    opened: (state) =>
      state.link.status === "open" && (!state.queries.views || state.queries.views.result?.error) && askViews(),
    isInteractive: true,
  };
}

/** Head and body of a result: numbers to the right, NULL said as such. */
export function fillTable(head, body, result, limit) {
  const isNumber = result.types.map((type) => /INT|DOUBLE|FLOAT|DECIMAL|REAL/i.test(type));
  const side = (index) => (isNumber[index] ? "right" : "left");
  head.replaceChildren(
    h(
      "tr",
      {},
      result.columns.map((column, index) =>
        h("th", { scope: "col", class: side(index), title: result.types[index], text: column }),
      ),
    ),
  );
  body.replaceChildren(
    ...result.rows.slice(0, limit).map((row) =>
      h(
        "tr",
        {},
        row.map((value, index) => h("td", { class: side(index), text: value === null ? "NULL" : cell(value) })),
      ),
    ),
  );
}

const cell = (value) =>
  typeof value === "object"
    ? JSON.stringify(value)
    : typeof value === "number" && !Number.isInteger(value)
      ? String(Number(value.toPrecision(8)))
      : String(value);

function summary(result) {
  const shown = result.rows.length > SHOWN ? `, the first ${SHOWN} shown` : "";
  return `${count(result.rows.length)} rows in ${number(result.seconds * 1000)} ms${result.truncated ? ", cut off at the row limit" : ""}${shown}`;
}
