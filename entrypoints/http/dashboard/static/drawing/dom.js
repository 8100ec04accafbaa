// Elements, and lists of them that keep what they have.

/** A new element. Text is only ever set as text: what clients and models wrote is never read as HTML. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Set an attribute or the text only where it differs: each write costs style and layout, and may be read aloud. */
export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Rows of a container by key: those that stay keep their element (and with it focus), the order follows ``items``. */
export class KeyedChildren {
  #elements = new Map();

  constructor(container, create, update) {
    this.container = container;
    this.create = create;
    this.update = update;
  }

  get(key) {
    return this.#elements.get(key);
  }

  /** items: [[key, value], …], keys differ. */
  show(items) {
    const kept = new Map();
    let before = this.container.firstElementChild;
    for (const [key, value] of items) {
      let own = this.#elements.get(key);
      if (own === undefined) own = this.create(value, key);
      this.update(own, value, key);
      kept.set(key, own);
      this.#elements.delete(key);
      if (own === before) {
        before = before.nextElementSibling;
      } else if (own.contains(document.activeElement)) {
        // Moving an element takes its focus away: the others move around it.
        while (before !== null && before !== own) {
          const next = before.nextElementSibling;
          this.container.append(before);
          before = next;
        }
        before = own.nextElementSibling;
      } else {
        this.container.insertBefore(own, before);
      }
    }
    for (const gone of this.#elements.values()) gone.remove();
    this.#elements = kept;
  }
}

/** Keys for values that may share a name: the second "a" is "a" + "\n1". */
export function uniqueKeys(values, name) {
  const seen = new Map();
  return values.map((value) => {
    const own = String(name(value));
    const times = seen.get(own) ?? 0;
    seen.set(own, times + 1);
    return [times === 0 ? own : `${own}\n${times}`, value];
  });
}
