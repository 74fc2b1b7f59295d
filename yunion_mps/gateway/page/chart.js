// A line of the last hour, drawn by hand.

import { clock, memory } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;

/** What was used of something, a number a minute: `add` sums several of them. */
export class Series {
  constructor(usage, used = null) {
    this.beginMs = Date.parse(usage.begin);
    this.step = usage.step;
    this.used = usage.looked.map((looked, place) => (looked ? (used ? used[place] ?? 0 : 0) : null));
  }

  add(used) {
    used.forEach((mib, place) => {
      if (this.used[place] !== null) this.used[place] += mib ?? 0;
    });
  }
}

/** A chart as wide and high as its place; `show` draws what is different. */
export class Chart {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    this.element.setAttribute("class", "chart");
    this.element.setAttribute("preserveAspectRatio", "none");
    this.element.setAttribute("role", "img");
    this.area = this.path("area");
    this.line = this.path("line");
    this.drawn = "";
  }

  path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.element.append(path);
    return path;
  }

  /** `most` is the top of the chart in MiB. */
  show(series, most) {
    const state = `${most} ${series.used}`;
    if (this.drawn === state) return;
    this.drawn = state;
    const last = series.used.length - 1;
    this.element.setAttribute("viewBox", `0 0 ${last} ${HEIGHT}`);
    const height = (mib) => HEIGHT - Math.min(1, mib / (most || 1)) * (HEIGHT - 4) - 2;
    let line = "";
    let area = "";
    for (const [from, to] of stretches(series.used)) {
      const points = [];
      for (let place = from; place <= to; place += 1) points.push(`${place},${height(series.used[place]).toFixed(1)}`);
      if (from === to) points.push(`${Math.min(from + 0.5, last)},${points[0].split(",")[1]}`);
      line += `M${points.join("L")}`;
      area += `M${points[0].split(",")[0]},${HEIGHT}L${points.join("L")}L${points.at(-1).split(",")[0]},${HEIGHT}Z`;
    }
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    this.element.setAttribute("aria-label", inWords(series));
  }
}

/** From where to where there are numbers. */
function stretches(numbers) {
  const found = [];
  numbers.forEach((number, place) => {
    if (number === null) return;
    if (found.length && found.at(-1)[1] === place - 1) found.at(-1)[1] = place;
    else found.push([place, place]);
  });
  return found;
}

function inWords(series) {
  const known = series.used.filter((mib) => mib !== null);
  if (!known.length) return "Memory used in the last hour: not known yet";
  const most = Math.max(...known);
  const when = clock(series.beginMs + series.used.indexOf(most) * series.step * 1000);
  return `Memory used in the last hour: ${memory(known.at(-1))} now, at most ${memory(most)}, at ${when}`;
}
