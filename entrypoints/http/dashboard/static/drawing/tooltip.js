// One tooltip for the page: facts and, where given, text.

import { element } from "./dom.js";

export class Tooltip {
  constructor(target) {
    this.target = target;
    this.owner = null;
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.hide();
    });
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  /** facts: [[name, value], …]; near: {left, right, top, bottom}, in the window. owner: identifies the caller to ``hide``. */
  show(owner, facts, text, near) {
    this.owner = owner;
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("dt", {}, name), element("dd", {}, element("bdi", {}, value)));
    this.target.replaceChildren(list);
    if (text) this.target.append(element("p", { class: "tip-text", dir: "auto" }, text));
    this.target.hidden = false;
    const { width, height } = this.target.getBoundingClientRect();
    const left = Math.max(8, Math.min(near.left, innerWidth - width - 8));
    const below = near.bottom + 8;
    const top = below + height + 8 <= innerHeight ? below : Math.max(8, near.top - height - 8);
    this.target.style.left = `${left}px`;
    this.target.style.top = `${top}px`;
  }

  /** Without an owner it hides any tooltip. */
  hide(owner = this.owner) {
    if (owner !== this.owner) return;
    this.owner = null;
    this.target.hidden = true;
  }
}
