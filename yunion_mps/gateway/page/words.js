// Numbers and moments in words.

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

/** MiB as people say it: 512 MiB, 5.6 GiB. */
export function memory(mib) {
  if (mib === null || mib === undefined) return "?";
  if (mib < 1024) return `${mib} MiB`;
  const gib = mib / 1024;
  return `${gib < 100 ? +gib.toFixed(1) : Math.round(gib)} GiB`;
}

/** Seconds in their two largest units: 3 h 12 min. */
export function duration(seconds) {
  let left = Math.max(0, Math.floor(seconds));
  const parts = [];
  for (const [size, name] of UNITS) {
    if (left >= size) {
      parts.push(`${Math.floor(left / size)} ${name}`);
      left %= size;
    }
  }
  return parts.slice(0, 2).join(" ") || "0 s";
}

let aheadMs = 0; // of this machine's clock, by which the host's goes

/** The host has just told that it was then (RFC 3339). */
export function setNow(time) {
  aheadMs = Date.parse(time) - Date.now();
}

/** How long ago the host's time (RFC 3339) is by its own clock, in words. */
export function ago(time) {
  return duration((Date.now() + aheadMs - Date.parse(time)) / 1000);
}

/** A time (RFC 3339, or ms since 1970) on the clock, with the day if it is not today. */
export function clock(moment) {
  const then = new Date(moment);
  const time = then.toLocaleTimeString(undefined, { hourCycle: "h23" });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString(undefined, { month: "short", day: "numeric" })} ${time}`;
}

/** 1 device, 2 devices. */
export function count(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}
