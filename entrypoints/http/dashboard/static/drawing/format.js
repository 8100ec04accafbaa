// Numbers, times and foreign text as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const rough = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });

/** 950, 9,870, 12.3K, 1.2M */
export function count(value) {
  return Math.abs(value) < 10_000 ? whole.format(value) : rough.format(value);
}

export function exact(value) {
  return whole.format(value);
}

export function tokens(value) {
  return `${count(value)} ${value === 1 ? "token" : "tokens"}`;
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function percent(share) {
  return `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
}

/** 0.34 -> 340 ms, 4.21 -> 4.2 s, 200 -> 3 min 20 s, 8000 -> 2 h 13 min */
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(1000 * Math.max(0, seconds))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  return countdown(seconds);
}

/** Whole seconds, for what is read while it changes. */
export function countdown(seconds) {
  const left = Math.max(0, Math.round(seconds));
  if (left < 60) return `${left} s`;
  if (left < 3600) return `${Math.floor(left / 60)} min ${left % 60} s`;
  return `${Math.floor(left / 3600)} h ${Math.floor((left % 3600) / 60)} min`;
}

// Without the joiners U+200C and U+200D, which scripts and emoji need.
const CONTROL = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\u3164\\ufeff\\uffa0\\u{e0000}-\\u{e007f}]",
  "gu",
);
const NO_SIGN = /^[\s\u200c\u200d]+$/;

/** Text of clients and models: controls become signs that can be seen, so that nothing hides or turns what follows, and
 * so do spaces where there is nothing else. */
export function visible(text, { lines = false } = {}) {
  const shown = String(text).replace(CONTROL, (character) => {
    const code = character.codePointAt(0);
    if (lines && character === "\n") return character;
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u2039${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
  });
  return NO_SIGN.test(shown) && !lines ? shown.replace(/./gu, "\u2423") : shown;
}

/** At most ``limit`` characters, none of them cut in two. */
export function shortened(text, limit) {
  if (text.length <= limit) return text;
  const kept = text.slice(0, limit - 1);
  return `${/[\ud800-\udbff]$/.test(kept) ? kept.slice(0, -1) : kept}…`;
}
