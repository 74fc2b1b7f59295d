// The holders, one row for each part of a GPU that has one.

import { Chart, Series } from "./chart.js";
import { attribute, byId, className, hide, Keyed, make, Pages, style, text } from "./dom.js";
import { share } from "./gpus.js";
import { ago, clock } from "./words.js";

const ROWS = 15;
const WRONG = ["over budget", "outside MPS", "no device"];
const COLUMNS = ["device", "state", "user", "command", "pid", "memory", "peak", "util", "sm", "age", "hour"];

export class Who {
  /** `turned` is called when the page of rows changes. */
  constructor(turned) {
    this.turned = turned;
    this.parts = [];
    this.shown = [];
    this.usage = null;
    this.rows = new Keyed(byId("rows"), makeRow, (row, part) => this.showRow(row, part));
    this.filter = byId("filter");
    this.filter.addEventListener("input", () => this.turn(0));
    this.pages = new Pages(byId("who-pages"), ROWS, (first) => this.turn(first));
  }

  show(parts) {
    const held = parts.filter((part) => part.pids);
    const isWrong = (part) => WRONG.includes(part.state);
    this.parts = [...held.filter(isWrong), ...held.filter((part) => !isWrong(part))];
    this.draw();
  }

  turn(first) {
    this.pages.first = first;
    this.draw();
    this.turned();
  }

  /** The GPUs of the rows shown. */
  gpus() {
    return [...new Set(this.shown.map((part) => part.gpu))].filter(Boolean);
  }

  showUsage(usage) {
    this.usage = { whole: usage, used: new Map(usage.devices.map((one) => [one.addr, one.memory_used_mib])) };
    this.draw();
  }

  /** Filters by this GPU or device, or removes the filter if it is already set. */
  choose(address) {
    this.filter.value = this.filter.value === address ? "" : address;
    this.turn(0);
    byId("who").scrollIntoView({ block: "start" });
    this.filter.focus({ preventScroll: true });
  }

  draw() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.parts.filter((part) => {
      const all = searched(part);
      return words.every((word) => all.includes(word));
    });
    this.shown = this.pages.of(found);
    this.rows.show(this.shown.map((part) => [[part.gpu, part.lease ?? (part.devices.join() || part.state)].join(" "), part]));
    hide(byId("rows").parentElement, !found.length);
    hide(byId("no-holders"), found.length > 0);
    text(byId("no-holders"), words.length ? "No holders match the filter." : "No device is in use. To use one, run: yunion-mps run COMMAND");
    text(byId("shown"), words.length ? `${found.length} of ${this.parts.length}` : "");
  }

  showRow(row, part) {
    const { device, state, user, command, pid, peak, util, sm } = row.cells;
    text(device, part.devices.join(", ") || part.gpu);
    text(state, part.unavailable ? `${part.state}, unavailable` : part.state);
    className(row.element, WRONG.includes(part.state) || part.unavailable ? "wrong" : "");
    text(user, part.user ?? "");
    text(command, part.command);
    attribute(command, "title", part.command);
    text(pid, part.pids.length > 1 ? `${part.pids[0]} +${part.pids.length - 1}` : String(part.pids[0] ?? "–"));
    attribute(pid, "title", part.pids.join(", "));
    const used = part.used ?? "?"; // unknown on a lost GPU
    text(row.amount, part.budget === undefined ? String(used) : `${used} of ${part.budget}`);
    hide(row.meter, part.budget === undefined);
    style(row.fill, "width", `${share(part)}%`);
    text(peak, String(part.peak ?? ""));
    text(util, String(part.sm ?? ""));
    text(sm, String(part.threads ?? ""));
    row.since = part.since;
    showAge(row);
    const drawn = this.usage && part.devices.length;
    hide(row.chart.element, !drawn);
    if (!drawn) return;
    row.chart.show(new Series(this.usage.whole, ...part.devices.map((one) => this.usage.used.get(one))), part.budget);
  }

  /** Updates the ages. */
  tick() {
    for (const row of this.rows.kept.values()) showAge(row);
  }
}

function searched(part) {
  const words = [part.gpu, ...part.devices, part.user, part.command, part.lease, part.state, ...part.pids];
  return words.filter(Boolean).join(" ").toLowerCase();
}

function showAge({ cells, since }) {
  text(cells.age, since === undefined ? "" : ago(since));
  if (since !== undefined) attribute(cells.age, "title", `since ${clock(since)}`);
}

function makeRow() {
  const made = COLUMNS.map((name) => [name, make("td", `cell-${name}`, { role: "cell" })]);
  const row = { cells: Object.fromEntries(made), since: undefined, chart: new Chart() };
  row.amount = make("span");
  row.fill = make("b");
  row.meter = make("i", "meter", {}, row.fill);
  row.cells.memory.append(row.amount, row.meter);
  row.cells.hour.append(row.chart.element);
  row.element = make("tr", "", { role: "row" }, ...Object.values(row.cells));
  return row;
}
