// The events, newest first, one page at a time.

import { byId, hide, Keyed, make, Pages, text } from "./dom.js";
import { clock } from "./words.js";

const ROWS = 8;
const MOST = 200;
const SIGNS = { info: "", warning: "!", error: "✕" };

export class Events {
  /** `get` asks the daemon for events. */
  constructor(get) {
    this.get = get;
    this.events = [];
    this.last = 0;
    this.whole = false; // whether all older events have been loaded
    this.list = new Keyed(byId("list"), makeEvent);
    this.pages = new Pages(byId("event-pages"), ROWS, (first) => this.turn(first));
  }

  /** Load the newest. */
  async begin() {
    const { events, last } = await this.get(`limit=${2 * ROWS}`);
    this.events = events.reverse();
    this.last = last;
    this.pages.first = 0;
    this.draw();
  }

  add({ events, last }) {
    this.last = last;
    this.events = [...[...events].reverse(), ...this.events];
    if (this.pages.first) this.pages.first += events.length; // older events that a user is reading stay in view
    else if (this.events.length > MOST) [this.events.length, this.whole] = [MOST, false];
    this.draw();
    const heard = events.filter((one) => one.severity !== "info");
    if (heard.length) text(byId("said"), heard.map((one) => `${one.severity}: ${one.subject}: ${one.what}`).join("; "));
  }

  async turn(first) {
    const oldest = this.events.at(-1).id;
    if (first + ROWS >= this.events.length && oldest > 1) {
      const { events } = await this.get(`before=${oldest}&limit=${2 * ROWS}`).catch(() => ({ events: [] }));
      const older = events.reverse();
      this.events.push(...older);
      this.whole = !older.length;
    }
    this.pages.first = first;
    this.draw();
  }

  draw() {
    hide(byId("no-events"), this.events.length > 0);
    hide(byId("list"), !this.events.length);
    const more = this.events.length > 0 && this.events.at(-1).id > 1 && !this.whole;
    this.list.show(this.pages.of(this.events, more).map((one) => [one.id, one]));
  }
}

function makeEvent(event) {
  const when = make("time", "dim", { datetime: event.time }, clock(event.time));
  const sign = make("span", "sign", { "aria-hidden": "true" }, SIGNS[event.severity] ?? "");
  const what = make("p", "what", {}, sign);
  if (event.severity !== "info") what.append(make("span", "unseen", {}, `${event.severity}: `));
  what.append(make("strong", "", {}, `${event.kind} ${event.subject}`), ` ${event.what}`);
  if (event.count > 1) what.append(make("span", "dim", {}, ` · ${event.count} times until ${clock(event.last_time)}`));
  for (const why of [event.cause && `cause: ${event.cause}`, event.consequence]) {
    if (why) what.append(make("span", "dim", {}, ` · ${why}`));
  }
  return { element: make("li", event.severity, {}, when, what) };
}
