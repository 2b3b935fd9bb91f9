// Texts and numbers as the page shows them. Whatever a run recorded is hostile text: see `visible` and `plain`.

// Control, bidirectional and invisible characters, tags, and halves of surrogate pairs. Tab and newline stay.
export const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb" +
    "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e0fff}\\ud800-\\udfff]",
  "gu",
);

const CONTROLS = [
  ..."NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI".split(" "),
  ..."DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" "),
];

/** A symbol that any font has. */
export function symbolOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return `⟨${CONTROLS[code]}⟩`;
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** A recorded value as a text, which a number or an object may be where a text should be; nothing is empty. */
export function textOf(value) {
  return value === null || value === undefined ? "" : valueText(value);
}

/** The text as one string without hidden characters, for attributes, options and titles. */
export function plain(text) {
  return textOf(text).replace(HIDDEN, symbolOf);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return plain(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) {
    return value.toExponential(Math.max(2, digits - 2)).replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${(100 * share).toFixed(1)} %`;
}

export function counted(count, one, several) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : (several ?? `${one}s`)}`;
}

export function capitalized(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** Any JSON value as a text. */
export function valueText(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "string" ? value : JSON.stringify(value);
}

export function timeText(seconds) {
  if (typeof seconds !== "number") return "–";
  const at = new Date(seconds * 1000);
  const two = (part) => String(part).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export function durationText(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 120) return `${number(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

export function known(values) {
  return (values ?? []).filter((value) => typeof value === "number" && Number.isFinite(value));
}

/** Least and greatest value; Math.min(...values) fails on long lists. */
export function extent(values) {
  let least = Infinity;
  let greatest = -Infinity;
  for (const value of values) {
    if (value < least) least = value;
    if (value > greatest) greatest = value;
  }
  return [least, greatest];
}

/** Pearson's correlation; null if one of the two does not vary. */
export function correlation(ones, others) {
  const [one, other] = [mean(ones), mean(others)];
  let both = 0;
  let first = 0;
  let second = 0;
  ones.forEach((value, i) => {
    both += (value - one) * (others[i] - other);
    first += (value - one) ** 2;
    second += (others[i] - other) ** 2;
  });
  return first > 1e-12 && second > 1e-12 ? both / Math.sqrt(first * second) : null;
}

/** The texts of some values, each once and in order. */
export function distinct(values) {
  return [...new Set(values.map(textOf).filter((value) => value !== ""))].sort();
}

export function distinctInOrder(values) {
  return [...new Set(values)];
}
