// Amounts, durations and times as text.

/** MiB as GiB: 5.6, 80. */
function gib(mib) {
  const number = mib / 1024;
  return String(number < 100 ? +number.toFixed(1) : Math.round(number));
}

/** MiB as text: 5.6 GiB; "?" if unknown. */
export const memory = (mib) => (isKnown(mib) ? `${gib(mib)} GiB` : "?");

/** Used and total MiB as text: 2.8 of 80 GiB. */
export const memoryOf = (used, total) => `${isKnown(used) ? gib(used) : "?"} of ${memory(total)}`;

const isKnown = (number) => number !== null && number !== undefined;

/** Seconds as the command line writes ages: 42s, 5m, 2h10m, 4d2h. */
export function duration(seconds) {
  const [s, m, h, d] = [1, 60, 3600, 86400].map((size) => Math.floor(Math.max(0, seconds) / size));
  if (m < 1) return `${s}s`;
  if (h < 1) return `${m}m`;
  if (d < 1) return `${h}h${m % 60 ? `${m % 60}m` : ""}`;
  return `${d}d${d < 10 && h % 24 ? `${h % 24}h` : ""}`;
}

let aheadMs = 0; // how far the host's clock is ahead of this machine's

/** Sets the host's current time (RFC 3339). */
export function setNow(time) {
  aheadMs = Date.parse(time) - Date.now();
}

/** The age in seconds of a time of the host (RFC 3339), by the host's clock. */
export const secondsSince = (time) => (Date.now() + aheadMs - Date.parse(time)) / 1000;

/** The same as text. */
export const ago = (time) => duration(secondsSince(time));

/** A time (RFC 3339, or ms since 1970) as text, with the date unless it is today. */
export function clock(moment) {
  const then = new Date(moment);
  const time = then.toLocaleTimeString(undefined, { hourCycle: "h23" });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString(undefined, { month: "short", day: "numeric" })} ${time}`;
}

/** 1 device, 2 devices. */
export const count = (number, name, names = `${name}s`) => `${number} ${number === 1 ? name : names}`;
