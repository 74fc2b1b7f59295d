// The events, newest first, one page at a time.

import { byId, hide, Keyed, make, Pages, text } from "./dom.js";
import { clock, secondsSince } from "./words.js";

const ROWS = 8;
const MOST = 200;
const DAY_S = 86_400;
const BAD_REQUEST = 400;
const SIGNS = { info: "", warning: "!", error: "✕" };

export class Events {
  /** `get` asks the daemon for events. */
  constructor(get) {
    this.get = get;
    this.events = [];
    this.last = 0;
    this.whole = false; // whether all older events have been loaded
    this.severe = []; // recent warnings and errors, which many others may have moved to later pages
    this.list = new Keyed(byId("list"), makeEvent);
    this.earlier = new Keyed(byId("severe"), makeEvent);
    this.pages = new Pages(byId("event-pages"), ROWS, (first) => this.turn(first));
  }

  /** Load the newest. */
  async begin() {
    const { events, last } = await this.get(`limit=${2 * ROWS}`);
    const severe = await this.get(`limit=${ROWS}&severe_first=true`).catch((error) => {
      if (error.status !== BAD_REQUEST) throw error;
      return { events }; // an earlier daemon, which an upgrade has not replaced yet, does not know the parameter
    });
    this.events = [...events].reverse();
    this.severe = mostSevere(severe.events);
    this.last = last;
    this.pages.first = 0;
    this.draw();
  }

  /** Adds what has happened since; an event that has happened again has the id of the first, and a new count. */
  add({ events, last }) {
    this.last = last;
    const newest = this.events[0]?.id ?? 0;
    const added = events.filter((one) => one.id > newest);
    const again = new Map(events.map((one) => [one.id, one]));
    this.events = [...added.reverse(), ...this.events.map((one) => again.get(one.id) ?? one)];
    if (this.pages.first) this.pages.first += added.length; // older events that a user is reading stay in view
    else if (this.events.length > MOST) [this.events.length, this.whole] = [MOST, false];
    const heard = events.filter(isSevere);
    this.severe = mostSevere([...heard, ...this.severe.filter((one) => !again.has(one.id))]);
    if (heard.length) text(byId("said"), heard.map((one) => `${one.severity}: ${one.subject}: ${one.what}`).join("; "));
    this.draw();
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
    const shown = this.pages.of(this.events, more);
    this.list.show(shown.map(keyed));
    const isEarlier = (one) => one.id < shown.at(-1).id && isRecent(one);
    const earlier = this.pages.first || !shown.length ? [] : this.severe.filter(isEarlier);
    this.earlier.show(earlier.map(keyed));
    hide(byId("earlier"), !earlier.length);
  }
}

/** An event with its key; one that has happened again is another element. */
const keyed = (event) => [`${event.id} ${event.count}`, event];

function isSevere(event) {
  return event.severity !== "info";
}

function isRecent(event) {
  return secondsSince(event.last_time) < DAY_S;
}

/** The recent warnings and errors for which there is room, in the daemon's order of ranks, newest first. */
export function mostSevere(events) {
  const severe = events.filter((one) => isSevere(one) && isRecent(one));
  severe.sort((one, other) => (one.rank ?? 0) - (other.rank ?? 0) || other.id - one.id);
  return severe.slice(0, ROWS).sort((one, other) => other.id - one.id);
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
