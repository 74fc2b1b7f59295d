// What happened, the newest first.

import { byId, hide, Keyed, make, text } from "./dom.js";
import { clock } from "./words.js";

const MOST = 60;
const SIGNS = { info: "", warning: "!", error: "✕" };

export class Events {
  constructor() {
    this.events = [];
    this.last = 0;
    this.list = new Keyed(byId("list"), makeEvent, () => {});
  }

  /** All of them, from the first. */
  begin({ events, last }) {
    this.events = events;
    this.last = last;
    this.draw();
  }

  add({ events, last }) {
    this.last = last;
    this.events = [...this.events, ...events].slice(-MOST);
    this.draw();
    const heard = events.filter((one) => one.severity !== "info");
    if (heard.length) text(byId("said"), heard.map((one) => `${one.severity}: ${one.subject}: ${one.what}`).join("; "));
  }

  draw() {
    hide(byId("no-events"), this.events.length > 0);
    this.list.show(this.events.map((one) => [one.id, one]).reverse());
  }
}

function makeEvent(event) {
  const when = make("time", "dim", { datetime: event.time }, clock(event.time));
  const sign = make("span", "sign", { "aria-hidden": "true" }, SIGNS[event.severity] ?? "");
  const what = make("p", "what", {}, sign);
  if (event.severity !== "info") what.append(make("span", "unseen", {}, `${event.severity}: `));
  what.append(make("strong", "", {}, `${event.kind} ${event.subject}`), ` ${event.what}`);
  const element = make("li", event.severity, {}, when, what);
  for (const [name, words] of [["Why", event.cause], ["So", event.consequence]]) {
    if (words) element.append(make("p", "dim", {}, `${name}: ${words}`));
  }
  return { element };
}
