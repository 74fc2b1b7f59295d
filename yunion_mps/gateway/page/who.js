// Who has what: a row for each part that somebody has.

import { Chart, Series } from "./chart.js";
import { attribute, byId, className, hide, Keyed, make, text } from "./dom.js";
import { ago, clock, memory } from "./words.js";

/** So many rows are shown at first, and more with each request for more. */
const STEP = 200;
const WRONG = new Set(["over budget", "outside MPS", "no device"]);

export class Who {
  constructor() {
    this.parts = [];
    this.shown = [];
    this.most = STEP;
    this.usage = null;
    this.rows = new Keyed(byId("rows"), makeRow, (row, part) => this.showRow(row, part));
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => this.draw());
    byId("more").addEventListener("click", () => {
      this.most += STEP;
      this.draw();
    });
  }

  show(parts) {
    this.parts = parts.filter((part) => part.processes);
    this.draw();
  }

  /** The GPUs that rows are shown of. */
  gpus() {
    return [...new Set(this.shown.map((part) => part.gpu))].filter(Boolean);
  }

  showUsage(usage) {
    this.usage = { whole: usage, used: new Map(usage.devices.map((one) => [one.addr, one.memory_used])) };
    this.draw();
  }

  /** Show only what belongs to this GPU or device; all again where that is shown already. */
  choose(address) {
    this.filter.value = this.filter.value === address ? "" : address;
    this.filter.dispatchEvent(new Event("input"));
    byId("who").scrollIntoView({ block: "start" });
    this.filter.focus({ preventScroll: true });
  }

  draw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.parts.filter((part) => {
      const all = searched(part);
      return words.every((word) => all.includes(word));
    });
    const seen = new Map();
    this.shown = found.slice(0, this.most);
    for (const part of this.shown) {
      const key = part.lease ?? part.devices.join(",");
      seen.set(`${part.gpu} ${part.state === "outside MPS" || part.state === "no device" ? part.state : key}`, part);
    }
    this.rows.show([...seen]);
    hide(byId("rows").parentElement, !found.length);
    hide(byId("nobody"), found.length > 0);
    const none = "Nobody has a device. To take one for a command: yunion-mps run COMMAND";
    text(byId("nobody"), words.length ? "Nobody whom this filter takes." : none);
    text(byId("shown"), words.length ? `${found.length} of ${this.parts.length}` : "");
    hide(byId("more"), found.length <= this.most);
    text(byId("more"), `Show ${Math.min(STEP, found.length - this.most)} more of ${found.length}`);
  }

  showRow(row, part) {
    const names = part.devices.length ? part.devices.join(", ") : part.gpu;
    text(row.device, names);
    hide(row.state, part.state === "in use" && !part.unavailable);
    text(row.state, part.unavailable ? `${part.state}, unavailable` : part.state);
    className(row.element, WRONG.has(part.state) ? "wrong" : "");
    text(row.user, part.user ?? "");
    const main = part.processes.reduce((most, one) => ((one.memory ?? 0) > (most?.memory ?? -1) ? one : most), null);
    text(row.command, main?.command ?? part.command ?? part.name ?? "");
    text(row.more, [part.container && `container ${part.container}`, part.name, pids(part)].filter(Boolean).join(" · "));
    row.moment = part.since;
    showSince(row);
    const budget = part.budget === undefined ? "" : ` of ${memory(part.budget)}`;
    text(row.amount, `${memory(part.used)}${budget}`);
    const width = `${part.budget ? Math.min(100, Math.round((part.used / part.budget) * 100)) : 0}%`;
    if (row.fill.style.width !== width) row.fill.style.width = width;
    hide(row.meter, part.budget === undefined);
    row.chart.element.toggleAttribute("hidden", !(this.usage && part.devices.length));
    if (this.usage && part.devices.length) {
      const series = new Series(this.usage.whole);
      for (const device of part.devices) series.add(this.usage.used.get(device) ?? []);
      row.chart.show(series, part.budget);
    }
  }

  /** What changes by itself. */
  tick() {
    for (const row of this.rows.kept.values()) showSince(row);
  }
}

function searched(part) {
  const jobs = part.processes.flatMap((one) => [one.user, one.command, one.pid]);
  return [part.gpu, ...part.devices, part.user, part.command, part.name, part.container, part.lease, part.state, ...jobs]
    .filter(Boolean).join(" ").toLowerCase();
}

function pids(part) {
  const found = part.processes.map((one) => one.pid);
  if (!found.length) return "";
  return found.length > 3 ? `${found.length} processes` : `PID ${found.join(", ")}`;
}

function showSince(row) {
  const words = row.moment === undefined ? "" : ago(row.moment);
  text(row.since, words);
  if (row.moment !== undefined) attribute(row.since, "title", clock(row.moment));
}

function makeRow() {
  const row = { moment: undefined, chart: new Chart() };
  row.device = make("span", "address");
  row.state = make("span", "tag");
  row.user = make("span");
  row.command = make("span", "command");
  row.more = make("span", "dim");
  row.since = make("span");
  row.amount = make("span", "amount");
  row.fill = make("b");
  row.meter = make("i", "meter", {}, row.fill);
  const cells = [[row.device, row.state], [row.user], [row.command, row.more], [row.since], [row.amount, row.meter], [row.chart.element]];
  row.element = make("tr", "", { role: "row" }, ...cells.map((inner) => make("td", "", { role: "cell" }, ...inner)));
  return row;
}
