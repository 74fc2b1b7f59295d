// GPUs as bars that are divided into devices; idle GPUs are folded.

import { Chart, Series } from "./chart.js";
import { attribute, byId, className, hide, Keyed, make, style, text } from "./dom.js";
import { count, memory, memoryOf } from "./words.js";

/** The parts of a bar are labelled up to this number. */
const NAMED = 10;
/** With more GPUs in use than this, they are shown as tiles. */
const MANY = 8;

/** States that a label with a user's name mentions if there is room; on a phone, only the part's look shows them. */
const STATED = ["idle", "no memory", "reserved", "unavailable"];

const LOOKS = {
  "in use": "used", "over budget": "over", idle: "idle", free: "free", reserved: "out", "no memory": "out", unavailable: "out",
};

/** The ways of sharing that the page names differently. */
const WAYS = { mig: "MIG mode", mps: "MPS" };

/** All GPUs; `choose` is called with the address of the GPU or device that the user selects. */
export class Gpus {
  constructor(choose) {
    this.rows = new Keyed(byId("busy"), (item) => new Row(item.gpu), (row, item) => row.show(item));
    const [summary, list] = byId("idle").children;
    this.summary = summary;
    this.idle = new Keyed(list, makeIdle, showIdle);
    byId("busy").addEventListener("click", (event) => {
      const address = event.target.closest("[data-address]")?.dataset.address;
      if (address) choose(address);
    });
  }

  show(gpus, parts) {
    const own = new Map(gpus.map((gpu) => [gpu.addr, []]));
    for (const part of parts) own.get(part.gpu)?.push(part);
    const all = gpus.map((gpu) => [gpu.addr, { gpu, parts: own.get(gpu.addr) }]);
    // A GPU is busy if one of its MIG instances is.
    const inUse = new Set(all.filter(([, item]) => !isIdle(item)).map(([address]) => address.split("-")[0]));
    const isFolded = ([address, item]) => isIdle(item) && !inUse.has(address);
    const idle = all.filter(isFolded);
    const busy = all.filter((one) => !isFolded(one));
    const many = busy.length > MANY;
    hide(byId("no-gpus"), gpus.length > 0);
    hide(byId("key"), !busy.length);
    hide(byId("busy"), !busy.length);
    hide(byId("idle"), !idle.length);
    className(byId("busy"), many ? "tiles" : "box");
    this.rows.show(busy.map(([key, item]) => [key, { ...item, many }]));
    this.idle.show(idle);
    const sum = (number) => idle.reduce((total, [, item]) => total + number(item), 0);
    const devices = sum(({ parts }) => parts.length);
    const pools = sum(({ gpu }) => gpu.memory_free_mib ?? 0);
    const free = [devices ? `${count(devices, "device")} free` : "", pools ? `${memory(pools)} free in pools` : ""];
    const instances = idle.filter(([, { gpu }]) => gpu.parent).length;
    const whole = idle.length - instances;
    const numbers = [whole ? count(whole, "idle GPU") : "", instances ? count(instances, "idle MIG instance") : ""];
    text(this.summary, [...numbers, ...free].filter(Boolean).join(", "));
  }

  showUsage(usage) {
    const used = new Map(usage.gpus.map((one) => [one.addr, one.memory_used_mib]));
    for (const [address, row] of this.rows.kept) row.showUsage(new Series(usage, used.get(address)));
  }
}

const isIdle = ({ gpu, parts }) =>
  gpu.state !== "unavailable" && !gpu.reserved_for && !gpu.memory_used_mib && parts.every((part) => part.state === "free");

/** The state of that part of a pool's memory that is not leased. */
const poolState = (gpu) => (gpu.reserved_for ? "reserved" : "free");

class Row {
  constructor(gpu) {
    const help = "Show only the holders of this GPU's devices";
    this.name = make("span", "dim");
    [this.counts, this.reason, this.used, this.load] =
      ["counts dim", "reason", "amount", "load dim"].map((name) => make("p", name));
    this.bar = make("div", "bar", { role: "img" });
    this.parts = new Keyed(this.bar, makePart, showPart);
    this.chart = new Chart();
    this.series = null;
    const address = make("button", "address", { type: "button", title: help, "data-address": gpu.addr }, gpu.addr);
    const cells = [[make("h3", "", {}, address, " ", this.name), this.counts], [this.bar, this.reason], [this.used, this.load], [this.chart.element]];
    this.element = make("li", "gpu", {}, ...cells.map((inner) => make("div", "", {}, ...inner)));
  }

  show({ gpu, parts, many }) {
    const own = parts.filter((part) => part.devices.length);
    if (gpu.memory_free_mib) own.push({ state: poolState(gpu), devices: [], budget: gpu.memory_free_mib });
    const named = !many && own.length <= NAMED;
    const words = counts(gpu, parts);
    text(this.name, gpu.name);
    text(this.counts, words);
    this.parts.show(own.map((part) => [part.devices.join(), { part, named }]));
    hide(this.bar, own.every((part) => part.state === "unavailable"));
    className(this.bar, named ? "bar" : "bar narrow");
    attribute(this.bar, "aria-label", named ? [words, ...own.map(about)].join("; ") : words);
    hide(this.reason, !gpu.reason);
    text(this.reason, `${gpu.state[0].toUpperCase()}${gpu.state.slice(1)}: ${gpu.reason}`);
    attribute(this.reason, "title", gpu.reason);
    text(this.used, gpu.memory_mib ? memoryOf(gpu.memory_used_mib, gpu.memory_mib) : gpu.memory_used_mib ? memory(gpu.memory_used_mib) : "");
    const load = [[gpu.utilization, "%"], [gpu.temperature_c, "°C"], [gpu.power_w && Math.round(gpu.power_w), "W"]];
    text(this.load, load.slice(0, many ? 1 : 3).filter(([number]) => Number.isFinite(number)).map((one) => one.join(" ")).join(" · "));
    this.total = gpu.memory_mib;
    this.many = many;
    this.showUsage(this.series);
  }

  showUsage(series) {
    this.series = series;
    hide(this.chart.element, this.many || !series);
    if (series && !this.many) this.chart.show(series, this.total);
  }
}

function makePart() {
  const [fill, label] = [make("b"), make("span", "label")];
  return { element: make("i", "", {}, fill, label), fill, label };
}

function showPart({ element, fill, label }, { part, named }) {
  className(element, `part ${LOOKS[part.state]}`);
  style(element, "flexGrow", String(Math.max(part.budget ?? 1, 1)));
  style(fill, "width", named ? `${share(part)}%` : "");
  style(fill, "height", named ? "" : `${share(part)}%`);
  text(label, named ? labelOf(part) : "");
  attribute(label, "data-state", named && part.user && STATED.includes(part.state) ? `, ${part.state}` : "");
  attribute(element, "title", about(part));
  attribute(element, "data-address", part.devices[0] ?? "");
}

/** The percentage of its budget that is used. */
export const share = (part) => (part.budget ? Math.min(100, Math.round(((part.used ?? 0) / part.budget) * 100)) : 0);

function labelOf(part) {
  if (!part.devices.length) return `${memory(part.budget)} ${part.state}`;
  if (part.state === "over budget") return `! ${part.user}`;
  return part.user ?? part.state;
}

/** Describes a part: 00:06.0-1: alice, in use, 512 of 5760 MiB. */
function about({ devices, user, state, used, budget }) {
  const of = Number.isFinite(budget) ? `${user ? `${used ?? "?"} of ` : ""}${budget} MiB` : Number.isFinite(used) ? `${used} MiB` : "";
  const words = [user, state, of].filter(Boolean).join(", ");
  return devices.length ? `${devices.join(", ")}: ${words}` : words;
}

/** The number of parts in each state. */
function counts(gpu, parts) {
  const by = {};
  for (const part of parts) by[part.state] = (by[part.state] ?? 0) + (part.devices.length || 1);
  const words = ["outside MPS", "no device", ...Object.keys(LOOKS)].filter((state) => by[state]).map((state) => `${by[state]} ${state === "free" && gpu.free_for !== null ? `free for ${gpu.free_for || "no user now"}` : state}`);
  if (gpu.memory_free_mib !== null) words.push(`${memory(gpu.memory_free_mib)} ${poolState(gpu)}`);
  if (gpu.state === "not used") words.push("not used");
  if (gpu.way) words.push(WAYS[gpu.way] ?? gpu.way);
  if (!gpu.budget_enforced && parts.length) words.push("not enforced");
  return words.join(", ");
}

function makeIdle({ gpu }) {
  const [name, free, total] = [make("span", "dim"), make("span"), make("span", "dim")];
  return { element: make("li", "", {}, make("span", "address", {}, gpu.addr), name, free, total), name, free, total };
}

function showIdle({ name, free, total }, { gpu, parts }) {
  text(name, gpu.name);
  text(free, counts(gpu, parts));
  text(total, memory(gpu.memory_mib));
}
