// Numbers as people read them: adaptive digits, unit apart, an em dash where nothing was measured.

export const NOTHING = "–";

const GROUPED = new Intl.NumberFormat("en-US"); // made once: `toLocaleString` makes one at every call
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

/** Three significant digits below 1000, grouped thousands above. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NOTHING;
  const rounded = Number(value.toPrecision(3));
  const size = Math.abs(rounded);
  if (size >= 1000) return GROUPED.format(Math.round(value));
  if (size >= 100 || Number.isInteger(value)) return rounded.toFixed(0);
  return size >= 10 ? rounded.toFixed(1) : rounded.toFixed(2);
}

export const count = (value) =>
  value === null || value === undefined ? NOTHING : GROUPED.format(Math.round(value));

/** A share of 0 to 1 as percent. */
export function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return NOTHING;
  const value = share * 100;
  return value === 0 || value >= 10 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2);
}

/** A span of seconds in its two largest units. */
export function span(seconds) {
  if (seconds === null || seconds === undefined) return NOTHING;
  if (seconds < 10) return `${Number.isInteger(seconds) ? seconds : Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export const age = (seconds) => (seconds < 1 ? "just now" : `${span(Math.floor(seconds))} ago`);

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${step ? value.toFixed(1) : value} ${units[step]}`;
}

export const clock = (unix) => CLOCK.format(unix * 1000);

/** The values that a lever takes, where its control does not show them. */
export function leverBounds(lever) {
  if (lever.kind === "bool" || lever.kind === "choice") return "";
  if (lever.kind === "text" || lever.minimum === undefined || lever.maximum === undefined) return lever.bounds;
  const unit = lever.unit ? ` ${lever.unit}` : "";
  return `${GROUPED.format(lever.minimum)} to ${GROUPED.format(lever.maximum)}${unit}${lever.none_word ? ` or ${lever.none_word}` : ""}`;
}

/** A lever value as the terminal shows it. */
export function leverValue(lever, value) {
  if (lever.kind === "bool") return value ? "on" : "off";
  if (lever.none_word && value === -1) return lever.none_word;
  return typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value);
}
