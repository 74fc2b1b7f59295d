// Amounts and moments in words.

const UNITS = [[86400, "d"], [3600, "h"], [60, "m"], [1, "s"]];

/** MiB as GiB: 5.6, 80. */
function gib(mib) {
  const number = mib / 1024;
  return String(number < 100 ? +number.toFixed(1) : Math.round(number));
}

/** MiB as people say it: 5.6 GiB. */
export const memory = (mib) => (mib === null || mib === undefined ? "?" : `${gib(mib)} GiB`);

/** What is used of something, both in MiB: 2.8 of 80 GiB. */
export const memoryOf = (used, total) => `${gib(used)} of ${memory(total)}`;

/** Seconds in their two largest units: 2h10m. */
export function duration(seconds) {
  let left = Math.max(0, Math.floor(seconds));
  const first = UNITS.findIndex(([size]) => left >= size);
  if (first < 0) return "0s";
  return UNITS.slice(first, first + 2).map(([size, name]) => {
    const number = Math.floor(left / size);
    left %= size;
    return number ? `${number}${name}` : "";
  }).join("");
}

let aheadMs = 0; // how far the host's clock is ahead of this machine's

/** The host has just told that it was then (RFC 3339). */
export function setNow(time) {
  aheadMs = Date.parse(time) - Date.now();
}

/** How long ago the host's time (RFC 3339) is by its own clock, in words. */
export const ago = (time) => duration((Date.now() + aheadMs - Date.parse(time)) / 1000);

/** A time (RFC 3339, or ms since 1970) on the clock, with the day unless that is today. */
export function clock(moment) {
  const then = new Date(moment);
  const time = then.toLocaleTimeString(undefined, { hourCycle: "h23" });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString(undefined, { month: "short", day: "numeric" })} ${time}`;
}

/** 1 device, 2 devices. */
export const count = (number, name, names = `${name}s`) => `${number} ${number === 1 ? name : names}`;
