// The tree for keyboards and screen readers: real tree items over the canvas, at the places of their spans. Only those
// around the active one exist (its parent, siblings, children), so that 2,000 spans do not become 2,000 elements.

import { element, KeyedChildren, setAttribute } from "../drawing/dom.js";
import { spokenOf } from "./icicle_words.js";

const SIBLINGS = 8;
const CHILDREN = 12;

export class TreeItems {
  #active = ["root"];

  /**
   * calls: zoom(node), out(), shown(node), left(): what the keys ask for; bounds(node) and zoomed(): where things are.
   */
  constructor(scene, calls) {
    this.scene = scene;
    this.calls = calls;
    this.icicle = null;
    this.list = element("div", { role: "tree", "aria-label": "Cached token spans", "aria-describedby": "tree-help" });
    scene.layer.append(this.list);
    this.children = new KeyedChildren(this.list, (node) => this.#create(node), (own, node) => this.#update(own, node));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    this.list.addEventListener("focusout", () => this.calls.left());
  }

  get active() {
    return this.icicle.get(this.#active.at(-1)) ?? this.icicle.root;
  }

  get hasFocus() {
    return this.list.contains(document.activeElement);
  }

  /** icicle: the newest; the active item stays where it is, or goes to the nearest above it that is left. */
  show(icicle) {
    const focused = this.hasFocus;
    const changed = icicle !== this.icicle;
    this.icicle = icicle;
    while (this.#active.length > 1 && !icicle.get(this.#active.at(-1))) this.#active.pop();
    this.#remember(this.active);
    this.children.show(this.#around(this.active).map((node) => [node.key, node]));
    if (focused && !this.hasFocus) this.#focus();
    else if (focused && changed && this.#shownByKeyboard()) this.calls.shown(this.active);
  }

  setActive(node) {
    this.#remember(node);
    if (this.hasFocus) this.#move(node);
  }

  #remember(node) {
    const path = [];
    for (let at = node; at !== null; at = at.parent) path.unshift(at.key);
    this.#active = path;
  }

  #around(node) {
    const siblings = node.parent === null ? [node] : node.parent.children;
    const from = Math.max(0, node.place - SIBLINGS);
    const near = siblings.slice(from, node.place + SIBLINGS + 1);
    return [...(node.parent === null ? [] : [node.parent]), ...near, ...node.children.slice(0, CHILDREN)];
  }

  #create(node) {
    const item = element("div", { role: "treeitem", class: "tree-item", tabindex: "-1" });
    item.dataset.key = node.key;
    item.addEventListener("click", () => this.#act(item, this.calls.zoom));
    item.addEventListener("focus", () => {
      const own = this.icicle.get(item.dataset.key);
      if (own === undefined) return;
      this.#remember(own);
      if (this.#shownByKeyboard()) this.calls.shown(own);
    });
    return item;
  }

  #shownByKeyboard() {
    return document.activeElement?.matches(".tree-item:focus-visible") ?? false;
  }

  #update(item, node) {
    const active = node === this.active;
    setAttribute(item, "tabindex", active ? "0" : "-1");
    setAttribute(item, "aria-label", spokenOf(node));
    setAttribute(item, "aria-level", node.depth + 1);
    setAttribute(item, "aria-setsize", node.parent === null ? 1 : node.parent.children.length);
    setAttribute(item, "aria-posinset", node.place + 1);
    setAttribute(item, "aria-selected", node === this.calls.zoomed());
    const { left, top, width, height } = this.calls.bounds(node);
    item.style.left = `${left}px`;
    item.style.top = `${top}px`;
    item.style.width = `${width}px`;
    item.style.height = `${height}px`;
  }

  #act(item, call) {
    const node = this.icicle.get(item.dataset.key);
    if (node) call(node);
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const node = this.active;
    const atTop = node === this.calls.zoomed();
    const moves = {
      ArrowDown: () => node.children[0],
      ArrowUp: () => node.parent,
      ArrowLeft: () => (atTop ? undefined : node.parent?.children[node.place - 1]),
      ArrowRight: () => (atTop ? undefined : node.parent?.children[node.place + 1]),
      Home: () => this.icicle.root,
      End: () => (atTop ? undefined : node.parent?.children.at(-1)),
    };
    if (event.key in moves) this.#move(moves[event.key]());
    else if (event.key === "Enter" || event.key === " ") this.calls.zoom(node);
    else if (event.key === "Escape") this.calls.out();
    else return;
    event.preventDefault();
  }

  #move(node) {
    if (!node) return;
    this.#remember(node);
    // Up past what the view shows: the view follows.
    const zoomed = this.calls.zoomed();
    if (node.depth < zoomed.depth) this.calls.zoom(node);
    this.show(this.icicle);
    const { top, height } = this.calls.bounds(node);
    this.scene.reveal(top, top + height);
    this.#focus();
  }

  #focus() {
    this.children.get(this.active.key)?.focus({ preventScroll: true });
  }
}
