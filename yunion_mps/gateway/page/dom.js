// Changes to the document, only where something differs. Users' text is inserted as text only.

export const byId = (id) => document.getElementById(id);

/** A new element with a class, attributes and children; strings among the children are text. */
export function make(name, className = "", attributes = {}, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function text(element, words) {
  if (element.textContent !== words) element.textContent = words;
}

export function className(element, name) {
  if (element.className !== name) element.className = name;
}

export function attribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

export function style(element, name, value) {
  if (element.style[name] !== value) element.style[name] = value;
}

export function hide(element, hidden) {
  element.toggleAttribute("hidden", hidden);
}

/** Elements that follow a list of items by key: they are created, moved and removed only as needed. */
export class Keyed {
  constructor(parent, create, update = () => {}) {
    this.parent = parent;
    this.create = create;
    this.update = update;
    this.kept = new Map();
  }

  show(items) {
    const before = this.kept;
    this.kept = new Map();
    let place = this.parent.firstChild;
    for (const [key, item] of items) {
      const kept = before.get(key) ?? this.create(item, key);
      before.delete(key);
      this.kept.set(key, kept);
      this.update(kept, item);
      if (kept.element === place) place = place.nextSibling;
      else this.parent.insertBefore(kept.element, place);
    }
    for (const { element } of before.values()) element.remove();
  }
}

/** The pages of a list: a button back, the position, and a button forward. */
export class Pages {
  constructor(nav, size, turned) {
    [this.back, this.where, this.on] = nav.children;
    this.nav = nav;
    this.size = size;
    this.first = 0;
    this.back.addEventListener("click", () => turned(Math.max(0, this.first - size)));
    this.on.addEventListener("click", () => turned(this.first + size));
  }

  /** Returns the items of this page; `more`: whether there are more than these. */
  of(items, more = false) {
    if (this.first >= items.length) this.first = Math.max(0, Math.ceil(items.length / this.size - 1) * this.size);
    const page = items.slice(this.first, this.first + this.size);
    const last = this.first + page.length;
    hide(this.nav, !more && items.length <= this.size);
    text(this.where, `${this.first + 1}–${last}${more ? "" : ` of ${items.length}`}`);
    this.back.disabled = this.first === 0;
    this.on.disabled = !more && last >= items.length;
    return page;
  }
}
