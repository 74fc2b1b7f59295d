// The host: its state, problems and usage.

import { Chart, Series } from "./chart.js";
import { byId, className, hide, Keyed, make, text } from "./dom.js";
import { ago, count, memory } from "./words.js";

const SIGNS = { ready: "✓", degraded: "!", failed: "✕", disabled: "–", "no answer": "✕" };

export class Summary {
  constructor() {
    this.problems = new Keyed(byId("problems"), makeProblem);
    this.figures = new Keyed(byId("figures"), makeFigure, (kept, { value, more: words }) => {
      text(kept.value, value);
      text(kept.more, words);
    });
    this.waiting = new Keyed(byId("waiting"), makeWaiting, (kept, one) => text(kept.age, `, waiting for ${ago(one.since)}`));
    this.chart = new Chart();
    this.whole = new Set();
    byId("use-chart").append(this.chart.element);
  }

  show(shown) {
    text(byId("host"), shown.host);
    document.title = `${shown.wrong ? `(${shown.wrong}) ` : ""}${shown.host} – yunion-mps`;
    this.showState(shown.state, shown.state);
    this.showAbout(shown);
    const told = [...shown.problems, ...shown.errors.map((text) => ({ title: "Incomplete", text, hint: "" }))];
    hide(byId("wrong"), !told.length);
    this.problems.show(told.map((one) => [`${one.title} ${one.text} ${one.hint}`, one]));
    this.showFigures(shown);
    hide(byId("queue"), !shown.queued);
    this.waiting.show(shown.waiting.map((one, place) => [`${place} ${one.since}`, one]));
    const behind = shown.queued - shown.waiting.length;
    hide(byId("queued"), !behind);
    text(byId("queued"), `and ${count(behind, "more request")}`);
  }

  showState(state, look) {
    text(byId("state"), `${SIGNS[state] ?? "?"} ${state}`);
    className(byId("state"), `state ${look}`);
  }

  showAbout({ version, driver, started }) {
    const cuda = driver.cuda_version ? `, CUDA ${driver.cuda_version}` : "";
    const words = [`yunion-mps ${version}`, driver.version ? `driver ${driver.version}${cuda}` : "driver unknown"];
    text(byId("about"), [...words, `up ${ago(started)}`].join(" · "));
  }

  showFigures({ devices, gpus: all, leases, clients, queued }) {
    const gpus = all.filter((gpu) => !gpu.parent); // what is used of MIG instances counts for their GPUs
    this.whole = new Set(gpus.map((gpu) => gpu.addr));
    const sum = (field, some = gpus) => some.reduce((total, gpu) => total + (gpu[field] ?? 0), 0);
    const pool = sum("memory_free_mib", all.filter((gpu) => !gpu.reserved_for));
    const free = [devices.total || !pool ? `${devices.free} free` : "", pool ? `${memory(pool)} free in pools` : ""];
    for (const state of ["reserved", "unavailable"]) if (devices[state]) free.push(`${devices[state]} ${state}`);
    this.total = gpus.some((gpu) => gpu.memory_mib !== null) ? sum("memory_mib") : null;
    hide(byId("use"), !gpus.length);
    const busy = gpus.map((gpu) => gpu.utilization).filter(Number.isFinite);
    const figures = [
      ["Devices in use", { value: `${devices.used}${devices.total ? ` of ${devices.total}` : ""}`, more: free.filter(Boolean).join(", ") }],
      ["Memory used", { value: memory(sum("memory_used_mib")), more: `of ${memory(this.total)}` }],
      ["Leases", { value: String(leases), more: `${count(clients, "process", "processes")}, ${queued || "none"} queued` }],
    ];
    const mean = Math.round(busy.reduce((total, one) => total + one, 0) / busy.length);
    if (busy.length) figures.splice(2, 0, ["Utilization", { value: `${mean} %`, more: `mean of ${count(busy.length, "GPU")}` }]);
    this.figures.show(figures);
  }

  showUsage(usage) {
    const gpus = usage.gpus.filter((one) => this.whole.has(one.addr));
    this.chart.show(new Series(usage, ...gpus.map((one) => one.memory_used_mib)), this.total);
    text(byId("use-top"), memory(this.total));
  }
}

function makeProblem({ title, text: what, hint }) {
  const words = make("p", "", {}, make("strong", "", {}, `${title}: `), what);
  const element = make("li", title.toLowerCase().replace(" ", "-"), {}, words);
  if (hint) element.append(make("p", "dim", {}, `Hint: ${hint}`));
  return { element };
}

function makeFigure(item, name) {
  const value = make("span", "value");
  const more = make("span", "dim");
  return { element: make("div", "", {}, make("dt", "", {}, name), make("dd", "", {}, value, " ", more)), value, more };
}

function makeWaiting({ user, command, requested }) {
  const age = make("span", "dim");
  return { element: make("li", "", {}, make("strong", "", {}, user), ` ${command} `, make("span", "dim", {}, `requests ${requested}`), age), age };
}
