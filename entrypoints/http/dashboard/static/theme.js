// Light and dark: the system's choice, or the reader's. Canvases ask here for the colours of the style sheet.

const STORED = "baton-dashboard-theme";

export class Theme {
  #style = getComputedStyle(document.documentElement);
  #colours = new Map();
  #changed = new Set();

  /** select: the switch, with the values auto, light and dark. */
  constructor(select) {
    const root = document.documentElement;
    select.value = root.dataset.theme ?? "auto";
    select.addEventListener("change", () => {
      if (select.value === "auto") delete root.dataset.theme;
      else root.dataset.theme = select.value;
      try {
        if (select.value === "auto") localStorage.removeItem(STORED);
        else localStorage.setItem(STORED, select.value);
      } catch {
        // Storage is turned off: the choice lasts as long as the page.
      }
      this.#tell();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#tell());
  }

  /** A colour of base.css: "ink" for --ink. */
  colour(name) {
    let found = this.#colours.get(name);
    if (found === undefined) {
      found = this.#style.getPropertyValue(`--${name}`).trim();
      this.#colours.set(name, found);
    }
    return found;
  }

  onChange(listener) {
    this.#changed.add(listener);
  }

  #tell() {
    this.#colours.clear();
    for (const listener of this.#changed) listener();
  }
}

const still = matchMedia("(prefers-reduced-motion: reduce)");

export function reducedMotion() {
  return still.matches;
}
