// A small Markdown of headings, lists, quotes, code and emphasis, built as nodes; model output never becomes markup.

import { h } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const BULLET = /^(\s*)([-*+])\s+(.*)$/;
const NUMBER = /^(\s*)(\d{1,9})[.)]\s+(.*)$/;

/** The source cut into blocks; a block that is still growing is the last one. */
export function blocks(source) {
  const found = [];
  const lines = source.replaceAll("\r\n", "\n").split("\n");
  let index = 0;
  while (index < lines.length) {
    if (!lines[index].trim()) {
      index += 1;
      continue;
    }
    const start = index;
    const kind = kindOf(lines[index]);
    index += 1;
    if (kind === "code") {
      const mark = FENCE.exec(lines[start])[1];
      while (
        index < lines.length &&
        !(lines[index].trim().startsWith(mark) && !lines[index].trim().slice(mark.length).trim())
      )
        index += 1;
      index += 1;
    } else if (kind !== "heading" && kind !== "rule") {
      while (index < lines.length && lines[index].trim() && continues(kind, lines[index])) index += 1;
    }
    found.push({ kind, lines: lines.slice(start, index) });
  }
  return found;
}

function kindOf(line) {
  if (FENCE.test(line)) return "code";
  if (/^#{1,6}\s/.test(line)) return "heading";
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) return "rule";
  if (BULLET.test(line)) return "bullets";
  if (NUMBER.test(line)) return "numbers";
  if (/^\s*>/.test(line)) return "quote";
  return "paragraph";
}

function continues(kind, line) {
  const next = kindOf(line);
  if (kind === "paragraph") return next === "paragraph";
  return next === kind || (next === "paragraph" && kind !== "quote");
}

/** Bring `parent` up to date with `source`, touching only the blocks that changed: the last one while it streams. */
export function renderMarkdown(parent, source) {
  const wanted = blocks(source);
  const known = (parent.blocks ??= []);
  wanted.forEach((block, index) => {
    const key = block.kind + block.lines.join("\n");
    if (known[index] === key) return;
    const element = build(block);
    if (parent.children[index]) parent.children[index].replaceWith(element);
    else parent.append(element);
    known[index] = key;
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
  known.length = wanted.length;
}

function build({ kind, lines }) {
  if (kind === "code") return codeBlock(lines);
  if (kind === "rule") return h("hr");
  if (kind === "heading") {
    const [, marks, words] = /^(#{1,6})\s+(.*?)\s*#*$/.exec(lines[0]) ?? ["", "#", lines[0]];
    return h(
      "p",
      { class: `heading h${marks.length}`, role: "heading", "aria-level": Math.min(6, marks.length + 3) },
      inline(words),
    );
  }
  if (kind === "quote")
    return h("blockquote", {}, inline(lines.map((line) => line.replace(/^\s*>\s?/, "")).join("\n")));
  if (kind === "bullets" || kind === "numbers") return items(kind, lines);
  return h("p", {}, inline(lines.join("\n")));
}

function codeBlock(lines) {
  const [, mark, language] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(mark);
  const body = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const label = language ? `Code, ${language}` : "Code";
  return h("pre", { tabindex: "0", role: "region", "aria-label": label }, h("code", { text: body }));
}

function items(kind, lines) {
  const pattern = kind === "bullets" ? BULLET : NUMBER;
  const entries = [];
  for (const line of lines) {
    const match = pattern.exec(line);
    if (match) entries.push({ depth: match[1].length, text: match[3] });
    else if (entries.length) entries.at(-1).text += `\n${line.trim()}`;
  }
  const first = kind === "numbers" ? Number(NUMBER.exec(lines[0])[2]) : 1;
  const element = h(kind === "bullets" ? "ul" : "ol", first === 1 ? {} : { start: first });
  for (const entry of entries)
    element.append(h("li", { class: entry.depth >= 2 ? "nested" : null }, inline(entry.text)));
  return element;
}

// Longer paragraphs stay plain, so that the pattern's backtracking has a bound whatever a model writes.
const LONGEST_INLINE = 4000;
const INLINE =
  /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(\S(?:.*?\S)?)\*\*|__(\S(?:.*?\S)?)__|\*(\S(?:[^*]*?\S)?)\*|(?<!\w)_(\S(?:[^_]*?\S)?)_(?!\w)/gs;

/** Code, strong and emphasis; a link stays text, because where it leads was written by a model. */
function inline(source) {
  if (source.length > LONGEST_INLINE) return [source];
  const nodes = [];
  let at = 0;
  for (const match of source.matchAll(INLINE)) {
    if (match.index > at) nodes.push(source.slice(at, match.index));
    const [, ticks, code, strong, strong2, emphasis, emphasis2] = match;
    if (ticks) nodes.push(h("code", { text: code }));
    else if (strong ?? strong2) nodes.push(h("strong", {}, inline(strong ?? strong2)));
    else nodes.push(h("em", {}, inline(emphasis ?? emphasis2)));
    at = match.index + match[0].length;
  }
  if (at < source.length) nodes.push(source.slice(at));
  return nodes;
}
