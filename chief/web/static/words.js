// Numbers in words.

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!isNumber(value)) return value == null ? "–" : String(value);
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(value >= 1e7 ? 1 : 2)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 10 ? 2 : 1);
}

export const loss = (value) => (isNumber(value) ? value.toFixed(4) : value == null ? "–" : String(value));

export const percent = (share) => (isNumber(share) ? `${Math.round(100 * share)} %` : "–");

export function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 1) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return value >= 1e-3 ? `${(1e3 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
}

export function rate(bytes) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(bytes < 10 * size ? 1 : 0)} ${unit}/s`;
  }
  return bytes ? `${bytes} B/s` : "–";
}

export const clock = (at) => new Date(1e3 * at).toLocaleTimeString([], { hour12: false });

export const measure = (name) => name.replace(/_s$/, "").replaceAll("_", " ");
