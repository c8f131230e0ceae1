// Building and updating elements: text only, never markup, and nothing written that has not changed.

/** An element; `on` holds listeners, `text` the content, every other key an attribute (false and null leave it out). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "text") element.textContent = value;
    else attr(element, name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function text(element, value) {
  const words = String(value);
  if (element.firstChild?.nodeType === Node.TEXT_NODE && !element.firstChild.nextSibling) {
    if (element.firstChild.data !== words) element.firstChild.data = words;
  } else if (element.textContent !== words) element.textContent = words;
}

export function attr(element, name, value) {
  if (value === false || value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const words = value === true ? "" : String(value);
    if (element.getAttribute(name) !== words) element.setAttribute(name, words);
  }
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** A width or position, through the style object: the policy forbids style attributes. */
export function share(element, name, value) {
  const width = `${(Math.max(0, Math.min(1, value || 0)) * 100).toFixed(1)}%`;
  if (element.style[name] !== width) element.style[name] = width;
}

/**
 * Children kept in step with `items`: elements are made once per key, updated in place, moved only when the order
 * changed, removed when their item went.
 */
export function list(parent, items, key, make, update) {
  const known = (parent.keyed ??= new Map());
  const wanted = new Set();
  let cursor = parent.firstElementChild;
  for (const item of items) {
    const id = key(item);
    wanted.add(id);
    let element = known.get(id);
    if (!element) {
      element = make(item);
      known.set(id, element);
    }
    if (element !== cursor) parent.insertBefore(element, cursor);
    else cursor = cursor.nextElementSibling;
    update?.(element, item);
  }
  for (const [id, element] of known) {
    if (wanted.has(id)) continue;
    element.remove();
    known.delete(id);
  }
}

/** An input with its label before it and its unit after it. */
export function field(input, label, unit = "") {
  const words = h("span", { text: label });
  return h("label", { class: "field", for: input.id }, words, input, unit && h("span", { class: "unit", text: unit }));
}

/** Move focus among `items` with the arrow keys, Home and End; exactly one of them is a tab stop. */
export function roving(container, selector, { onFocus = () => {}, vertical = false } = {}) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ...(vertical ? { ArrowDown: 1, ArrowUp: -1 } : {}) };
  container.addEventListener("keydown", (event) => {
    const item = event.target.closest(selector);
    if (!item || event.altKey || event.ctrlKey || event.metaKey) return;
    const items = [...container.querySelectorAll(selector)].filter((entry) => !entry.hidden);
    const at = items.indexOf(item);
    let next = at + (steps[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = items.length - 1;
    if (next === at || next < 0 || next >= items.length) return;
    event.preventDefault();
    item.tabIndex = -1;
    items[next].tabIndex = 0;
    items[next].focus();
  });
  container.addEventListener("focusin", (event) => {
    const item = event.target.closest(selector);
    if (item) onFocus(item);
  });
}
