// The cache's tree: what is in view, where the reader is in it, and how the view moves.

import { Scene } from "../drawing/canvas.js";
import { element, KeyedChildren, setAttribute, setText } from "../drawing/dom.js";
import { plural, shortened, tokens, visible } from "../drawing/format.js";
import { Icicle, pathTo } from "./icicle.js";
import { IciclePainter, ROW } from "./icicle_paint.js";
import { crumbOf, factsOf, namespaceName, spokenOf } from "./icicle_words.js";
import { reducedMotion } from "../theme.js";
import { TreeItems } from "./tree_items.js";

const ZOOM_MS = 180;
const LIT_MS = 1400;

export class TreePanel {
  #view = { from: 0, to: 1 };
  #moving = null;
  #path = ["root"];
  #lit = new Map();
  #hovered = null;
  #pointer = null;

  /** parts: {scene, summary, crumbs, namespace}, elements. */
  constructor(parts, { frames, theme, tooltip, announce }) {
    this.parts = parts;
    this.tooltip = tooltip;
    this.announce = announce;
    this.frames = frames;
    this.icicle = new Icicle({ spans: [], nodes: 0, tokens: 0, complete: true }, "*");
    this.painter = new IciclePainter(theme);
    this.draw = frames.add((now) => this.#draw(now));
    this.scene = new Scene(parts.scene, () => frames.ask(this.draw));
    theme.onChange(() => frames.ask(this.draw));
    this.items = new TreeItems(this.scene, {
      zoom: (node) => this.zoomTo(node),
      out: () => this.zoomOut(),
      bounds: (node) => this.#bounds(node),
      zoomed: () => this.zoomed,
      shown: (node) => this.#tip("focus", node),
      left: () => this.tooltip.hide("focus"),
    });
    this.crumbs = new KeyedChildren(parts.crumbs, () => this.#newCrumb(), (own, node) => this.#showCrumb(own, node));
    this.#listen();
  }

  #listen() {
    this.parts.namespace.addEventListener("change", () => this.show(this.snapshot));
    const canvas = this.scene.canvas;
    canvas.addEventListener("pointermove", (event) => {
      this.#pointer = event.pointerType === "touch" ? null : { clientX: event.clientX, clientY: event.clientY };
      this.#hover();
    });
    canvas.addEventListener("pointerleave", () => {
      this.#pointer = null;
      this.#hover();
    });
    canvas.addEventListener("click", (event) => {
      const node = this.#nodeUnder(event);
      if (node) this.zoomTo(node === this.zoomed && node.parent ? node.parent : node);
    });
  }

  /** The node that the view is zoomed to. */
  get zoomed() {
    return this.icicle.get(this.#path.at(-1)) ?? this.icicle.root;
  }

  clear() {
    this.#path = ["root"];
    this.#lit.clear();
    this.show(null);
  }

  /** snapshot: a tree event, or null where there is none yet. */
  show(snapshot) {
    const before = this.snapshot === snapshot ? null : this.icicle;
    this.snapshot = snapshot;
    const wanted = this.parts.namespace.value;
    this.icicle = new Icicle(snapshot ?? { spans: [], nodes: 0, tokens: 0, complete: true }, wanted);
    this.#showNamespaces();
    if (before !== null && before.byKey.size > 1) this.#light(before);
    // What the view was zoomed to may be gone: then the nearest above it that is left.
    while (this.#path.length > 1 && !this.icicle.get(this.#path.at(-1))) this.#path.pop();
    this.#path = pathTo(this.zoomed).map((node) => node.key);
    this.#moving = null;
    this.#view = this.#target();
    this.#hovered = this.#hovered && (this.icicle.get(this.#hovered.key) ?? null);
    this.#describe();
    this.frames.ask(this.draw);
  }

  zoomTo(node) {
    this.#path = pathTo(node).map((each) => each.key);
    const target = this.#target();
    this.#moving = reducedMotion() ? null : { from: this.#view, to: target, began: null };
    if (reducedMotion()) this.#view = target;
    this.tooltip.hide();
    this.#hovered = null;
    this.items.setActive(node);
    // Ancestors stay above as rows as wide as the view; the deepest of them stays in sight.
    this.scene.box.scrollTop = Math.max(0, (node.depth - 2) * ROW);
    this.#describe();
    this.announce(node.kind === "root" ? "The whole cache is shown" : `Zoomed to ${spokenOf(node)}`);
    this.frames.ask(this.draw);
  }

  zoomOut() {
    const parent = this.zoomed.parent;
    if (parent !== null) this.zoomTo(parent);
  }

  #target() {
    const node = this.zoomed;
    return node.share > 0 ? { from: node.left, to: node.left + node.share } : { from: 0, to: 1 };
  }

  #draw(now) {
    if (this.#moving !== null) {
      this.#moving.began ??= now;
      const done = Math.min(1, (now - this.#moving.began) / ZOOM_MS);
      const eased = 1 - (1 - done) ** 3;
      const { from, to } = this.#moving;
      this.#view = { from: from.from + (to.from - from.from) * eased, to: from.to + (to.to - from.to) * eased };
      if (done === 1) {
        // The pointer has stayed; what is under it has not.
        this.#moving = null;
        this.#hover();
      }
    }
    const lit = new Map();
    for (const [key, since] of this.#lit) {
      const strength = 1 - (now - since) / LIT_MS;
      if (strength <= 0) this.#lit.delete(key);
      else lit.set(key, Math.min(1, strength));
    }
    this.scene.setSpace(this.icicle.rows.length * ROW);
    this.painter.paint(this.scene, this.icicle, this.#view, { hovered: this.#hovered, lit });
    this.items.show(this.icicle);
    if (this.#moving !== null || lit.size) this.frames.ask(this.draw);
  }

  /** Spans that are new, or were used since the snapshot before, light up for a moment. */
  #light(before) {
    if (reducedMotion() || document.hidden) return;
    const now = performance.now();
    for (const [key, node] of this.icicle.byKey) {
      if (node.kind !== "span") continue;
      const old = before.get(key);
      if (old === undefined || node.uses > old.uses) this.#lit.set(key, now);
    }
  }

  #describe() {
    const { snapshot } = this;
    const shown = this.icicle.byKey.size - 1;
    setText(
      this.parts.summary,
      snapshot === null || shown === 0
        ? ""
        : `${tokens(snapshot.tokens)} in ${plural(snapshot.nodes, "node")}${snapshot.complete ? "" : ", not all walked"}`,
    );
    const path = pathTo(this.zoomed);
    const few = path.length > 6 ? [path[0], path[1], null, ...path.slice(-3)] : path;
    this.crumbs.show(path.length < 2 ? [] : few.map((node) => (node === null ? ["…", null] : [node.key, node])));
  }

  #newCrumb() {
    const crumb = element("button", { type: "button", class: "crumb" });
    crumb.addEventListener("click", () => {
      const node = this.icicle.get(crumb.dataset.key);
      if (node) this.zoomTo(node);
    });
    return crumb;
  }

  #showCrumb(crumb, node) {
    setText(crumb, node === null ? "…" : crumbOf(node));
    crumb.disabled = node === null;
    if (node === null) return;
    crumb.dataset.key = node.key;
    if (node === this.zoomed) setAttribute(crumb, "aria-current", "true");
    else crumb.removeAttribute("aria-current");
  }

  #showNamespaces() {
    const select = this.parts.namespace;
    const wanted = select.value;
    const names = this.icicle.namespaces.slice(0, 200);
    const values = ["*", ...names];
    // One that is chosen stays, though nothing of it is cached at the moment.
    if (wanted !== "*" && !names.includes(wanted)) values.push(wanted);
    if (values.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    const options = values.map((value) => {
      const option = element("option", {}, value === "*" ? "all" : shortened(namespaceName(value), 40));
      option.value = value;
      return option;
    });
    select.replaceChildren(...options);
    select.value = wanted;
  }

  /** In CSS pixels, from the top left of the whole drawing; at least as wide as can be pointed at. */
  #bounds(node) {
    const scale = this.scene.width / (this.#view.to - this.#view.from);
    const left = Math.max(0, Math.min(this.scene.width - 4, (node.left - this.#view.from) * scale));
    const right = Math.min(this.scene.width, (node.left + node.share - this.#view.from) * scale);
    return { left, width: Math.max(4, right - left - 1), top: node.depth * ROW, height: ROW - 1 };
  }

  #nodeUnder(event) {
    const { left, top } = this.scene.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - top + this.scene.top) / ROW);
    const perPixel = (this.#view.to - this.#view.from) / Math.max(1, this.scene.width);
    const share = this.#view.from + (event.clientX - left) * perPixel;
    return this.icicle.at(row, share, perPixel) ?? null;
  }

  #hover() {
    const node = this.#pointer === null || this.#moving !== null ? null : this.#nodeUnder(this.#pointer);
    if (node !== this.#hovered) {
      this.#hovered = node;
      this.scene.canvas.style.cursor = node ? "pointer" : "";
      this.frames.ask(this.draw);
    }
    if (node === null) this.tooltip.hide("pointer");
    else {
      const { clientX, clientY } = this.#pointer;
      this.#tip("pointer", node, { left: clientX + 8, right: clientX, top: clientY - 8, bottom: clientY + 8 });
    }
  }

  #tip(owner, node, near) {
    if (near === undefined) {
      const { left, top } = this.scene.canvas.getBoundingClientRect();
      const bounds = this.#bounds(node);
      const above = top + bounds.top - this.scene.top;
      near = { left: left + bounds.left, right: left + bounds.left, top: above, bottom: above + ROW };
    }
    const text = node.text ? visible(shortened(node.text, 400), { lines: true }) : null;
    this.tooltip.show(owner, factsOf(node, this.icicle.root.subtree), text, near);
  }
}
