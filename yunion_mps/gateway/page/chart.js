// A chart of the last hour.

import { attribute } from "./dom.js";
import { clock, memory } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;

/** Memory used in MiB, one number per minute, or null without a poll; `add` adds another series. */
export class Series {
  constructor(usage, ...used) {
    this.beginMs = Date.parse(usage.begin);
    this.stepS = usage.step_s;
    this.used = usage.polled.map((polled) => (polled ? 0 : null));
    for (const one of used) this.add(one);
  }

  add(used = []) {
    this.used = this.used.map((mib, place) => (mib === null ? null : mib + (used[place] ?? 0)));
  }
}

/** A chart that fills its parent; `show` draws what differs. */
export class Chart {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ class: "chart", preserveAspectRatio: "none", role: "img" })) {
      this.element.setAttribute(name, value);
    }
    [this.area, this.line] = ["area", "line"].map((name) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", name);
      this.element.append(path);
      return path;
    });
  }

  /** `most` is the top of the chart in MiB; if it is unknown, the largest value is. */
  show(series, most) {
    const top = most || Math.max(1, ...series.used.map((mib) => mib ?? 0));
    const points = series.used.map((mib) => mib !== null && Math.round(HEIGHT - 2 - Math.min(1, mib / top) * (HEIGHT - 4)));
    let [line, area, before] = ["", "", false];
    points.forEach((height, place) => {
      if (height !== false) line += before === false ? `M${place},${height}h0` : `L${place},${height}`;
      if (height !== false && before !== false) area += `M${place - 1},${HEIGHT}V${before}L${place},${height}V${HEIGHT}`;
      before = height;
    });
    attribute(this.element, "viewBox", `0 0 ${points.length - 1} ${HEIGHT}`);
    attribute(this.line, "d", line);
    attribute(this.area, "d", area);
    attribute(this.element, "aria-label", inWords(series));
  }
}

function inWords({ used, beginMs, stepS }) {
  const known = used.filter((mib) => mib !== null);
  if (!known.length) return "Memory used in the last hour: no data yet";
  const most = Math.max(...known);
  const when = clock(beginMs + used.indexOf(most) * stepS * 1000);
  return `Memory used in the last hour: ${memory(known.at(-1))} now, at most ${memory(most)} (at ${when})`;
}
