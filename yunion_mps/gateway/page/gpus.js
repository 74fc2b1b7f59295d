// GPUs as bars cut into devices.

import { Chart, Series } from "./chart.js";
import { attribute, byId, className, hide, Keyed, make, text } from "./dom.js";
import { count, memory } from "./words.js";

/** Up to so many parts have their names below them. */
const NAMED = 8;
/** From so many GPUs on they stand beside each other. */
const MANY = 5;

const LOOKS = { "in use": "used", "over budget": "over", idle: "idle", free: "free", "no room": "out", unavailable: "out" };

/** All of them; `choose` is called with the address of a GPU or device that somebody points at. */
export class Gpus {
  constructor(choose) {
    this.cards = new Keyed(byId("cards"), (gpu) => new Card(gpu, choose), (card, item) => card.show(item));
    byId("cards").addEventListener("mouseover", (event) => {
      const part = event.target.closest(".part");
      if (part && part.about) part.title = part.about();
    });
  }

  show(gpus, parts) {
    const own = new Map(gpus.map((gpu) => [gpu.addr, []]));
    for (const part of parts) own.get(part.gpu)?.push(part);
    hide(byId("no-gpus"), gpus.length > 0);
    hide(byId("key"), !gpus.length);
    className(byId("cards"), gpus.length < MANY ? "few" : "many");
    this.cards.show(gpus.map((gpu) => [gpu.addr, { gpu, parts: own.get(gpu.addr) }]));
  }

  showUsage(usage) {
    const used = new Map(usage.gpus.map((one) => [one.addr, one.memory_used]));
    for (const [address, card] of this.cards.kept) card.showUsage(new Series(usage, used.get(address)));
  }
}

class Card {
  constructor({ gpu }, choose) {
    const help = "Show only who has its devices";
    this.address = make("button", "address", { type: "button", title: help }, gpu.addr);
    this.address.addEventListener("click", () => choose(gpu.addr));
    this.name = make("span", "name dim");
    this.used = make("span", "amount");
    this.bar = make("div", "bar", { role: "img" });
    this.bar.addEventListener("click", (event) => {
      const part = event.target.closest(".part");
      if (part?.device) choose(part.device);
    });
    this.about = make("p", "counts");
    this.reason = make("p", "reason");
    this.chart = new Chart();
    this.series = null;
    this.total = 0;
    const head = make("h3", "", {}, this.address, this.name, this.used);
    this.element = make("li", "card", {}, head, this.bar, this.about, this.reason, this.chart.element);
    this.parts = new Keyed(this.bar, makePart, showPart);
  }

  show({ gpu, parts }) {
    text(this.name, (gpu.name ?? "").replace(/^NVIDIA /, ""));
    text(this.used, gpu.memory_total ? `${memory(gpu.memory_used)} of ${memory(gpu.memory_total)}` : "");
    hide(this.reason, !gpu.reason);
    text(this.reason, gpu.reason ? `Unavailable: ${gpu.reason}` : "");
    const own = parts.filter((part) => part.devices.length);
    const items = own.map((part) => [part.devices.join(","), part]);
    if (gpu.memory_free) items.push(["free", { free_mib: gpu.memory_free, budget: gpu.memory_free, state: "free", devices: [] }]);
    hide(this.bar, !items.length);
    className(this.bar, items.length > NAMED ? "bar narrow" : "bar");
    this.parts.show(items.map(([key, part]) => [key, { part, named: items.length <= NAMED }]));
    const words = counts(gpu, parts);
    text(this.about, words);
    attribute(this.bar, "aria-label", inWords(words, own));
    className(this.element, gpu.state === "unavailable" ? "card out" : "card");
    this.total = gpu.memory_total;
    this.showUsage(this.series);
  }

  showUsage(series) {
    this.series = series;
    hide(this.chart.element, !series);
    this.chart.element.toggleAttribute("hidden", !series);
    if (series) this.chart.show(series, this.total);
  }
}

function makePart() {
  const fill = make("b");
  const label = make("span", "label");
  const element = make("i", "part", {}, fill, label);
  return { element, fill, label };
}

function showPart(kept, { part, named }) {
  const { element, fill, label } = kept;
  className(element, `part ${LOOKS[part.state]}`);
  const wide = String(Math.max(part.budget ?? 1, 1));
  if (element.style.flexGrow !== wide) element.style.flexGrow = wide;
  const share = part.budget ? Math.min(1, (part.used ?? 0) / part.budget) : 0;
  const height = `${Math.round(share * 100)}%`;
  if (fill.style.height !== height) fill.style.height = height;
  text(label, named ? labelOf(part) : "");
  element.device = part.devices[0];
  element.about = () => about(part);
}

function labelOf(part) {
  if (part.free_mib) return `${memory(part.free_mib)} free`;
  if (part.state === "over budget") return `! ${part.user}`;
  return part.user ?? part.state;
}

/** One part in words. */
export function about(part) {
  if (part.free_mib) return `${memory(part.free_mib)} can still be had`;
  const name = part.devices.join(", ") || part.gpu;
  if (!part.user) return `${name}: ${part.state}, ${memory(part.budget)}`;
  const of = part.budget === undefined ? "" : ` of ${memory(part.budget)}`;
  return `${name}: ${part.user}, ${part.state}, ${memory(part.used ?? 0)}${of}`;
}

function counts(gpu, parts) {
  if (gpu.state === "not used") return "not used";
  const by = {};
  let devices = 0;
  for (const part of parts) {
    const number = part.devices.length || 1;
    by[part.state] = (by[part.state] ?? 0) + number;
    devices += part.devices.length;
  }
  const states = ["outside MPS", "no device", ...Object.keys(LOOKS)].filter((state) => by[state]);
  const words = [count(devices, "device"), ...states.map((state) => `${by[state]} ${state}`)];
  if (gpu.memory_free !== null) words.push(`${memory(gpu.memory_free)} free`);
  if (!gpu.budget_enforced) words.push("budgets not enforced");
  return words.join(" · ");
}

function inWords(words, parts) {
  return parts.length > NAMED ? words : [words, ...parts.map(about)].join("; ");
}
