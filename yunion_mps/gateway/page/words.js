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

let aheadS = 0; // of this machine's clock, by which the host's goes

/** The host has just told that it was then (s since 1970). */
export function setNow(moment) {
  aheadS = moment - Date.now() / 1000;
}

/** How long ago the host's moment (s since 1970) is by its own clock, in words. */
export function ago(moment) {
  return duration(Date.now() / 1000 + aheadS - moment);
}

/** A moment (s since 1970) on the clock, with the day where it is not today. */
export function clock(moment) {
  const then = new Date(moment * 1000);
  const time = then.toLocaleTimeString(undefined, { hourCycle: "h23" });
  if (then.toDateString() === new Date().toDateString()) return time;
  return `${then.toLocaleDateString(undefined, { month: "short", day: "numeric" })} ${time}`;
}

/** 1 device, 2 devices. */
export function count(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}
