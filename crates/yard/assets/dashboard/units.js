// Numbers for people, as `blockyard top` prints them: three digits, and a unit that people know.

const KIB = 1024;
const MIB = KIB * KIB;

// A number to three digits, without an exponent.
function threeDigits(value) {
  if (value >= 100) return value.toFixed(0);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// A value as the first of [least value, unit] that it reaches.
function scaled(value, scales) {
  const [least, unit] = scales.find(([least]) => value >= least) ?? scales[scales.length - 1];
  return `${threeDigits(value / least)}${unit}`;
}

// A number of events, or of events per second.
export function count(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "0";
  if (value >= 1000) return scaled(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"]]);
  return Number.isInteger(value) ? String(value) : threeDigits(value);
}

// Bytes per second, as a number of MiB.
export function mib(value) {
  return value === 0 ? "0" : count(value / MIB);
}

// A number of bytes; prefixes are binary.
export function bytes(value) {
  if (value < KIB) return String(value);
  return scaled(value, [[KIB ** 5, "P"], [KIB ** 4, "T"], [KIB ** 3, "G"], [MIB, "M"], [KIB, "K"]]);
}

// A time in nanoseconds.
export function duration(ns) {
  if (ns === null || ns === undefined) return "-";
  if (ns < 1000) return `${Math.round(ns)}ns`;
  return scaled(ns, [[1e9, "s"], [1e6, "ms"], [1e3, "us"]]);
}

export function percent(part, whole) {
  return whole > 0 ? `${(100 * part / whole).toFixed(0)}%` : "-";
}

// A ratio; "-" without a divisor.
export function ratio(value) {
  return value === null || !Number.isFinite(value) ? "-" : threeDigits(value);
}

// A time of day in the reader's time zone.
export function clock(ms) {
  return new Date(ms).toLocaleTimeString([], { hourCycle: "h23" });
}

// A mark of an axis of so many ms: a day for a week, else a time of day without seconds.
export function mark(ms, length) {
  const time = new Date(ms);
  if (length > 36 * 3_600_000) return time.toLocaleDateString([], { weekday: "short", day: "numeric" });
  return time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
}
