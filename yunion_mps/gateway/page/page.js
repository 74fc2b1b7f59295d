// Asks again and again, and hands on what came. Nothing is loaded from elsewhere, and nothing is ever changed.

import { Chart, Series } from "./chart.js";
import { byId, className, hide, Keyed, make, text } from "./dom.js";
import { Events } from "./events.js";
import { Gpus } from "./gpus.js";
import { Who } from "./who.js";
import { ago, clock, count, duration, memory, setNow } from "./words.js";

/** How often it looks; but a question that takes long is asked again only after so many times that. */
const LOOK_MS = 2000;
const REST = 20;
const MAX_REST_MS = 60000;
const USAGE_MS = 60000;
const MAX_PAUSE_MS = 8000;
const EVENTS_WAIT_S = 20;
/** With more devices, their hours are asked for GPU by GPU, and only of those that rows are shown of. */
const MAX_HOURS = 512;
/** Where the filter is kept while the page is reloaded. */
const KEPT = "yunion-mps filter";
const SIGNS = { ready: "✓", degraded: "!", failed: "✕", disabled: "–", "no answer": "✕" };

const who = new Who();
const gpus = new Gpus((address) => who.choose(address));
const events = new Events();
const wholeChart = new Chart();
byId("whole-chart").append(wholeChart.element);

let shown = null; // the picture that is on the page
let takenMs = 0; // when it was taken, by this machine's clock
let goneMs = 0; // since when there is no answer
let usage = null;
let files = ""; // which the page was loaded from

const findings = new Keyed(byId("findings"), makeFinding, () => {});
const figures = new Keyed(byId("figures"), makeFigure, (kept, { value, more }) => {
  text(kept.value, value);
  text(kept.more, more);
});
const waiting = new Keyed(byId("waiting"), () => ({ element: make("li") }), ({ element }, one) => {
  text(element, `${one.user} wants ${one.wants}, since ${clock(one.since)}${one.command ? `: ${one.command}` : ""}`);
});

/** The JSON at the address; throws an Error that has a `hint` where there is one. */
async function get(address, patienceMs = 20000) {
  let response;
  try {
    response = await fetch(address, { signal: AbortSignal.timeout(patienceMs), cache: "no-store" });
  } catch {
    const error = new Error("nothing answers where this page came from");
    error.hint = "is the daemon stopped, or web_listen gone? See: systemctl status yunion-mps-daemon yunion-mps-gateway";
    throw error;
  }
  const found = await response.json().catch(() => ({}));
  if (!response.ok) {
    const error = new Error(found.detail ?? `the answer was ${response.status}`);
    error.hint = found.hint ?? "";
    throw error;
  }
  return found;
}

/** Takes a picture, one in which the newest event that is known has happened; returns how long that took. */
async function look() {
  const beganMs = performance.now();
  let askedMs = 0;
  try {
    const picture = await get(`overview.json?event=${events.last}${shown ? `&mark=${shown.mark}` : ""}`);
    takenMs = Date.now();
    setNow(picture.taken);
    askedMs = performance.now() - beganMs;
    if (picture.page !== (files ||= picture.page)) return reload();
    back();
    if ("state" in picture) {
      shown = picture;
      draw();
    }
  } catch (error) {
    gone(error);
  }
  showAge();
  return askedMs;
}

/** After an upgrade: these files may not know what is told now. */
function reload() {
  sessionStorage.setItem(KEPT, who.filter.value);
  location.reload();
  return MAX_REST_MS;
}

function gone(error) {
  if (!goneMs) goneMs = Date.now();
  const from = shown ? ` All below is from ${clock(takenMs)}.` : "";
  const words = [make("strong", "", {}, `No answer since ${clock(goneMs)}: `), `${error.message}.${from}`];
  if (error.hint) words.push(make("span", "hint", {}, error.hint));
  const banner = byId("gone");
  const told = words.map((one) => one.textContent ?? one).join("");
  if (banner.hidden || banner.textContent !== told) banner.replaceChildren(...words);
  hide(banner, false);
  document.body.classList.add("stale");
  showState();
  document.title = `no answer – ${shown?.host ?? "yunion-mps"}`;
}

function back() {
  document.body.classList.remove("waiting");
  if (!goneMs) return;
  text(byId("said"), `The daemon answers again, after ${duration((Date.now() - goneMs) / 1000)}.`);
  goneMs = 0;
  hide(byId("gone"), true);
  document.body.classList.remove("stale");
  if (!shown) return;
  title();
  showState();
}

function title() {
  document.title = `${shown.wrong ? `(${shown.wrong}) ` : ""}${shown.host} – yunion-mps`;
}

function showAbout() {
  if (!shown) return;
  const { driver } = shown;
  const cuda = driver.cuda_version ? `, CUDA ${driver.cuda_version}` : "";
  const words = [`yunion-mps ${shown.version}`, driver.version ? `driver ${driver.version}${cuda}` : "driver not looked at"];
  text(byId("about"), [...words, `up ${ago(shown.started)}`].join(" · "));
}

function showState() {
  const state = goneMs ? "no answer" : shown.state;
  text(byId("state"), `${SIGNS[state] ?? "?"} ${state}`);
  className(byId("state"), `state ${goneMs ? "failed" : state}`);
}

function draw() {
  text(byId("host"), shown.host);
  title();
  showAbout();
  showState();
  const told = [...shown.findings, ...shown.errors.map((what) => ({ kind: "Not known", what, hint: "" }))];
  hide(byId("wrong"), !told.length);
  findings.show(told.map((one) => [`${one.kind} ${one.what} ${one.hint}`, one]));
  hide(byId("whole"), !shown.gpus.length);
  drawFigures();
  gpus.show(shown.gpus, shown.parts);
  who.show(shown.parts);
  hide(byId("queue"), !shown.waiting.length);
  waiting.show(shown.waiting.map((one, place) => [`${place} ${one.since}`, one]));
}

function drawFigures() {
  const { devices } = shown;
  const used = shown.gpus.reduce((sum, gpu) => sum + gpu.memory_used, 0);
  const total = shown.gpus.reduce((sum, gpu) => sum + (gpu.memory_total ?? 0), 0);
  const pool = shown.gpus.reduce((sum, gpu) => sum + (gpu.memory_free ?? 0), 0);
  const free = [devices.total || !pool ? `${devices.free} free` : "", pool ? `${memory(pool)} free in units` : ""];
  const out = devices.unavailable ? `${devices.unavailable} unavailable` : "";
  figures.show([
    ["Devices in use", { value: `${devices.used}${devices.total ? ` of ${devices.total}` : ""}`, more: [...free, out].filter(Boolean).join(", ") }],
    ["Memory in use", { value: memory(used), more: `of ${memory(total)}` }],
    ["Leases", { value: String(shown.leases), more: shown.waiting.length ? `${shown.waiting.length} waiting` : "nobody waits" }],
    ["Processes", { value: String(shown.clients), more: `on ${count(shown.gpus.length, "GPU")}` }],
  ]);
  drawWhole();
}

function drawWhole() {
  if (!usage || !shown) return;
  const series = new Series(usage);
  for (const one of usage.gpus) series.add(one.memory_used);
  const total = shown.gpus.reduce((sum, gpu) => sum + (gpu.memory_total ?? 0), 0);
  wholeChart.show(series, total);
  text(byId("whole-top"), memory(total));
}

function makeFinding({ kind, what, hint }) {
  const words = make("p", "", {}, make("strong", "", {}, `${kind}: `), what);
  const element = make("li", kind.toLowerCase().replace(" ", "-"), {}, words);
  if (hint) element.append(make("p", "what-to-do", {}, "Hint: ", hint));
  return { element };
}

function makeFigure(item, name) {
  const value = make("span", "value");
  const more = make("span", "dim");
  return { element: make("div", "", {}, make("dt", "", {}, name), make("dd", "", {}, value, more)), value, more };
}

function showAge() {
  if (!takenMs) return;
  const age = Math.round((Date.now() - takenMs) / 1000);
  text(byId("age"), `as of ${clock(takenMs)}${age > 2 ? `, ${duration(age)} ago` : ""}`);
}

async function askUsage() {
  if (!shown) return;
  const many = shown.devices.total > MAX_HOURS;
  try {
    const told = await get(`v1/usage${many ? "?devices=false" : ""}`);
    if (many) await askHours(told);
    usage = told;
  } catch {
    return; // what is wrong is told by what asks every few seconds
  }
  gpus.showUsage(usage);
  who.showUsage(usage);
  drawWhole();
}

/** Adds the hours of the devices that rows are shown of, where they are not in it; whether there were any. */
async function askHours(told) {
  told.asked ??= new Set();
  const missing = who.gpus().filter((gpu) => !told.asked.has(gpu));
  for (const gpu of missing) {
    told.asked.add(gpu);
    told.devices.push(...(await get(`v1/usage?gpu=${encodeURIComponent(gpu)}`)).devices);
  }
  return missing.length > 0;
}

/** Other rows are shown: ask for their hours. */
async function askMore() {
  if (!usage?.asked) return;
  if (await askHours(usage).catch(() => false)) who.showUsage(usage);
}

const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

/** Only a page that is seen asks. */
const seen = () => new Promise((done) => {
  if (!document.hidden) done();
  else document.addEventListener("visibilitychange", () => done(seen()), { once: true });
});

async function follow() {
  let last = null;
  let pauseMs = 500;
  for (;;) {
    await seen();
    try {
      if (last === null) {
        const told = await get("v1/events?limit=60");
        events.begin(told);
        last = told.last;
      }
      const told = await get(`v1/events?after=${last}&wait=${EVENTS_WAIT_S}`, (EVENTS_WAIT_S + 15) * 1000);
      pauseMs = 500;
      if (told.last < last) last = null; // the record was started again
      else if (told.events.length) {
        last = told.last;
        events.add(told);
        await look();
      }
    } catch {
      await pause(pauseMs);
      pauseMs = Math.min(pauseMs * 2, MAX_PAUSE_MS);
    }
  }
}

async function lookOn() {
  for (;;) {
    await seen();
    await pause(Math.max(LOOK_MS, Math.min(REST * (await look()), MAX_REST_MS)));
  }
}

async function askUsageOn() {
  for (;;) {
    await seen();
    await askUsage();
    await pause(usage?.looked.includes(true) ? USAGE_MS : LOOK_MS);
  }
}

who.filter.addEventListener("input", askMore);
byId("more").addEventListener("click", askMore);
who.filter.value = sessionStorage.getItem(KEPT) ?? "";
sessionStorage.removeItem(KEPT);
setInterval(() => { showAge(); if (!goneMs) showAbout(); who.tick(); }, 1000);
lookOn();
follow();
askUsageOn();
