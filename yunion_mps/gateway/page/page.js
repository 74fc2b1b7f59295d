// Polls the gateway and passes on its answers. Nothing is loaded from elsewhere, and nothing is changed on the host.

import { byId, hide, make, text } from "./dom.js";
import { Events } from "./events.js";
import { Gpus } from "./gpus.js";
import { Summary } from "./summary.js";
import { Who } from "./who.js";
import { clock, duration, setNow } from "./words.js";

/** The poll interval; after a slow answer, the page waits REST times as long as the answer took. */
const POLL_MS = 2000;
const REST = 20;
const MAX_REST_MS = 60000;
const USAGE_MS = 60000;
const MAX_PAUSE_MS = 8000;
const EVENTS_WAIT_S = 20;
/** Where the filter is kept while the page is reloaded. */
const KEPT = "yunion-mps filter";

const summary = new Summary();
const who = new Who(askUsage);
const gpus = new Gpus((address) => who.choose(address));
const events = new Events((query) => get(`v1/events?${query}`));

let shown = null; // the snapshot on the page
let takenMs = 0; // when it was received, by the browser's clock
let goneMs = 0; // since when there has been no answer
let usage = null;
let files = ""; // the version of the page's files

const failure = (message, hint = "") => Object.assign(new Error(message), { hint });

/** The JSON at the address; throws an Error with a `hint`, and with the `status` if there was an answer. */
async function get(address, patienceMs = 20000) {
  let response;
  try {
    response = await fetch(address, { signal: AbortSignal.timeout(patienceMs), cache: "no-store" });
  } catch {
    const hint = "check whether it is running: systemctl status yunion-mps-gateway yunion-mps-daemon";
    throw failure("the web server does not answer", hint);
  }
  const found = await response.json().catch(() => ({}));
  if (response.ok) return found;
  const error = failure(found.detail ?? `the server responded with status ${response.status}`, found.hint);
  throw Object.assign(error, { status: response.status });
}

/** Requests a snapshot that is newer than the newest known event; returns how long that took. */
async function poll() {
  const beganMs = performance.now();
  let askedMs = 0;
  try {
    const picture = await get(`overview.json?event=${events.last}${shown ? `&mark=${shown.mark}` : ""}`);
    takenMs = Date.now();
    setNow(picture.taken);
    askedMs = performance.now() - beganMs;
    if (picture.page !== (files ||= picture.page)) return reload();
    const isNew = "state" in picture;
    if (isNew) shown = picture;
    if (isNew || goneMs) summary.show(shown);
    if (isNew) gpus.show(shown.gpus, shown.parts);
    if (isNew) who.show(shown.parts);
    back();
  } catch (error) {
    gone(error);
  }
  showAge();
  return askedMs;
}

/** Reloads the page after an upgrade, because the old files may not understand the new answers. */
function reload() {
  sessionStorage.setItem(KEPT, who.filter.value);
  location.reload();
  return MAX_REST_MS;
}

function gone(error) {
  goneMs ||= Date.now();
  const from = shown ? ` Everything below is as of ${clock(takenMs)}.` : "";
  const words = [make("strong", "", {}, `No answer since ${clock(goneMs)}: `), `${error.message}.${from}`];
  if (error.hint) words.push(make("p", "dim", {}, `Hint: ${error.hint}`));
  const banner = byId("gone");
  const told = words.map((one) => one.textContent ?? one).join("");
  if (banner.hidden || banner.textContent !== told) banner.replaceChildren(...words);
  hide(banner, false);
  document.body.classList.add("stale");
  summary.showState("no answer", "failed");
  document.title = `no answer – ${shown?.host ?? "yunion-mps"}`;
}

function back() {
  document.body.classList.remove("waiting", "stale");
  if (goneMs) text(byId("said"), `The daemon answers again, after ${duration((Date.now() - goneMs) / 1000)}.`);
  goneMs = 0;
  hide(byId("gone"), true);
}

function showAge() {
  if (!takenMs) return;
  const age = Math.round((Date.now() - takenMs) / 1000);
  text(byId("age"), `as of ${clock(takenMs)}${age > 2 ? `, ${duration(age)} ago` : ""}`);
}

/** Requests the usage of the last hour, of the GPUs and of the devices in the rows shown. */
async function askUsage() {
  if (!shown) return;
  try {
    const told = await get("v1/usage?devices=false");
    for (const gpu of who.gpus()) told.devices.push(...(await get(`v1/usage?gpu=${encodeURIComponent(gpu)}`)).devices);
    usage = told;
  } catch {
    return; // the poll reports what is wrong
  }
  for (const one of [gpus, who, summary]) one.showUsage(usage);
}

const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

/** Only a visible page polls. */
const seen = () => new Promise((done) => {
  if (!document.hidden) done();
  else document.addEventListener("visibilitychange", () => done(seen()), { once: true });
});

async function followEvents() {
  let begun = false;
  let pauseMs = 500;
  for (;;) {
    await seen();
    try {
      if (!begun) await events.begin();
      begun = true;
      const told = await get(`v1/events?after=${events.last}&wait_s=${EVENTS_WAIT_S}`, (EVENTS_WAIT_S + 15) * 1000);
      pauseMs = 500;
      if (told.last < events.last) begun = false; // a new event log was started
      else if (told.events.length) {
        events.add(told);
        await poll();
      }
    } catch {
      await pause(pauseMs);
      pauseMs = Math.min(pauseMs * 2, MAX_PAUSE_MS);
    }
  }
}

async function pollOn() {
  for (;;) {
    await seen();
    await pause(Math.max(POLL_MS, Math.min(REST * (await poll()), MAX_REST_MS)));
  }
}

async function askUsageOn() {
  for (;;) {
    await seen();
    await askUsage();
    await pause(usage?.polled.includes(true) ? USAGE_MS : POLL_MS);
  }
}

who.filter.value = sessionStorage.getItem(KEPT) ?? "";
sessionStorage.removeItem(KEPT);
setInterval(() => {
  showAge();
  if (shown && !goneMs) summary.showAbout(shown);
  who.tick();
}, 1000);
pollOn();
followEvents();
askUsageOn();
