// The timeline: a moving window of time, its rows, the chosen request.

import { Scene } from "../drawing/canvas.js";
import { element, KeyedChildren, setAttribute, setText } from "../drawing/dom.js";
import { plural, shortened, visible } from "../drawing/format.js";
import { factsOf, factsOfJob, handedTo, wordsOfJob, wordsOfRow } from "./life_words.js";
import { jobKey, rowsOf } from "./lives.js";
import { AXIS, LivesPainter, ROW } from "./lives_paint.js";
import { reducedMotion } from "../theme.js";

const AHEAD = 0.14;
const SPARE_ROWS = 4;

export class LivesPanel {
  #rows = [];
  #active = null;
  #selected = null;
  #store = null;
  #drawnAt = -1;
  #changed = true;
  #folded = new Set();

  /** parts: {scene, summary, window, detail, empty}, elements. */
  constructor(parts, { frames, theme, tooltip }) {
    this.parts = parts;
    this.frames = frames;
    this.tooltip = tooltip;
    this.painter = new LivesPainter(theme);
    this.draw = frames.add(() => this.#draw());
    const redraw = () => {
      this.#changed = true;
      frames.ask(this.draw);
    };
    theme.onChange(redraw);
    this.scene = new Scene(parts.scene, redraw);
    this.list = element("div", { role: "listbox", "aria-label": "Requests, newest first", "aria-describedby": "lives-help" });
    this.scene.layer.append(this.list);
    this.options = new KeyedChildren(this.list, (row) => this.#newOption(row), (own, row) => this.#showOption(own, row));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    parts.window.addEventListener("change", redraw);
    const canvas = this.scene.canvas;
    canvas.addEventListener("click", (event) => this.#select(this.#rowUnder(event)));
    canvas.addEventListener("pointermove", (event) => this.#hover(event));
    canvas.addEventListener("pointerleave", () => this.tooltip.hide("life"));
  }

  clear() {
    this.#active = this.#selected = null;
    this.#folded.clear();
    this.#changed = true;
  }

  show(store) {
    this.#store = store;
    this.#changed = true;
    this.frames.ask(this.draw);
  }

  /** How many milliseconds until the window has moved by a pixel; a second at most (it may have no width yet). */
  get pace() {
    if (reducedMotion()) return 1000;
    return Math.max(40, Math.min(1000, (1000 * this.#span) / Math.max(1, this.scene.width)));
  }

  tick() {
    this.frames.ask(this.draw);
  }

  get #span() {
    return Number(this.parts.window.value);
  }

  get #gutter() {
    return this.scene.width < 560 ? 92 : 196;
  }

  #time() {
    const now = this.#store.clock.now();
    return { from: now - this.#span * (1 - AHEAD), to: now + this.#span * AHEAD, now };
  }

  #draw() {
    if (this.#store === null) return;
    const time = this.#time();
    if (!this.#changed && time.now === this.#drawnAt) return;
    this.#drawnAt = time.now;
    this.#changed = false;
    this.#rows = rowsOf(this.#store.lives, time.from, time.to, this.#folded);
    this.#describe();
    this.scene.setSpace(AXIS + this.#rows.length * ROW + 4);
    const deadlines = new Map();
    for (const lease of this.#store.update?.leases ?? []) {
      if (lease.rid !== null && lease.expires_in !== null) deadlines.set(lease.rid, this.#store.update.t + lease.expires_in);
    }
    this.painter.paint(this.scene, this.#rows, time, { gutter: this.#gutter, selected: this.#selected, deadlines });
    this.#showOptions();
    this.#showDetail(time.now);
  }

  #describe() {
    const { lives } = this.#store;
    const shown = this.#rows.reduce((sum, row) => sum + (row.life !== null ? 1 : row.isFolded ? row.members.length : 0), 0);
    const words =
      lives.size === 0
        ? ""
        : shown === lives.size
          ? plural(lives.size, "request")
          : `${shown} of the last ${plural(lives.size, "request")}`;
    setText(this.parts.summary, words);
    this.parts.empty.hidden = this.#rows.length > 0;
    const none = lives.size === 0 ? "Requests appear here as they arrive." : "None in this time. Choose a longer time to see earlier ones.";
    if (this.#rows.length === 0) setText(this.parts.empty, none);
  }

  #showOptions() {
    if (!this.#rows.some(({ key }) => key === this.#active)) this.#active = this.#rows[0]?.key ?? null;
    const first = Math.floor((this.scene.top - AXIS) / ROW) - SPARE_ROWS;
    const last = first + Math.ceil(this.scene.height / ROW) + 2 * SPARE_ROWS;
    const shown = [];
    this.#rows.forEach((row, index) => {
      row.place = index;
      if ((index >= first && index <= last) || row.key === this.#active) shown.push([row.key, row]);
    });
    this.list.hidden = shown.length === 0;
    this.options.show(shown);
  }

  #newOption(row) {
    const name = element("bdi", { class: "life-name" });
    const state = element("span", { class: "life-state" });
    const option = element("div", { role: "option", class: "life", tabindex: "-1" }, name, state);
    option.dataset.key = row.key;
    option.addEventListener("click", () => this.#select(this.#row(option.dataset.key)));
    option.addEventListener("focus", () => (this.#active = option.dataset.key));
    return option;
  }

  #showOption(option, row) {
    const [name, state] = option.children;
    const words = row.life === null ? wordsOfJob(row) : wordsOfRow(row);
    setText(name, words.name);
    setText(state, words.state);
    setAttribute(option, "aria-label", words.spoken);
    option.classList.toggle("life-job", row.life === null);
    setAttribute(option, "aria-selected", row.key === this.#selected);
    setAttribute(option, "aria-setsize", this.#rows.length);
    setAttribute(option, "aria-posinset", row.place + 1);
    setAttribute(option, "tabindex", row.key === this.#active ? "0" : "-1");
    option.style.top = `${AXIS + row.place * ROW}px`;
    option.style.width = `${this.#gutter}px`;
    option.style.paddingLeft = `${4 + 10 * Math.min(3, row.depth)}px`;
  }

  #row(key) {
    return this.#rows.find((row) => row.key === key);
  }

  #select(row) {
    if (row === undefined) return;
    if (row.life === null) this.#fold(row, !row.isFolded);
    else this.#selected = row.key === this.#selected ? null : row.key;
    this.#active = row.key;
    this.#changed = true;
    this.frames.ask(this.draw);
  }

  #fold(header, folds) {
    if (folds) this.#folded.add(header.key);
    else this.#folded.delete(header.key);
    const jobs = new Set([...this.#store.lives.values()].map((life) => jobKey(life.job_id)));
    for (const key of this.#folded) if (!jobs.has(key)) this.#folded.delete(key);
    this.#changed = true;
    this.frames.ask(this.draw);
  }

  #key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const row = this.#row(this.#active);
    if (row === undefined) return;
    const moves = {
      ArrowDown: () => this.#rows[row.place + 1],
      ArrowUp: () => this.#rows[row.place - 1],
      ArrowLeft: () => row.parent ?? row.header,
      ArrowRight: () => row.children[0],
      Home: () => this.#rows[0],
      End: () => this.#rows.at(-1),
    };
    if (row.life === null && event.key === "ArrowLeft") this.#fold(row, true);
    else if (row.isFolded && event.key === "ArrowRight") this.#fold(row, false);
    else if (event.key in moves) this.#moveTo(moves[event.key]());
    else if (event.key === "Enter" || event.key === " ") this.#select(row);
    else if (event.key === "Escape" && this.#selected !== null) this.#select(this.#row(this.#selected) ?? row);
    else return;
    event.preventDefault();
  }

  #moveTo(row) {
    if (!row) return;
    this.#active = row.key;
    this.scene.reveal(row.place * ROW, AXIS + (row.place + 1) * ROW);
    this.#showOptions();
    this.options.get(row.key)?.focus({ preventScroll: true });
  }

  #rowUnder(event) {
    const { top } = this.scene.canvas.getBoundingClientRect();
    return this.#rows[Math.floor((event.clientY - top + this.scene.top - AXIS) / ROW)];
  }

  #hover(event) {
    const row = event.pointerType === "touch" ? undefined : this.#rowUnder(event);
    if (row === undefined) {
      this.tooltip.hide("life");
      return;
    }
    const facts = row.life === null ? factsOfJob(row) : factsOf(row.life, this.#store.clock.now());
    if (row.life?.child !== undefined) facts.push(["Child", handedTo(row.life)]);
    const { clientX: left, clientY: y } = event;
    this.tooltip.show("life", facts, null, { left: left + 8, right: left, top: y - 8, bottom: y + 8 });
  }

  #showDetail(now) {
    const { detail } = this.parts;
    const life = this.#selected === null ? undefined : this.#store.lives.get(this.#selected);
    detail.hidden = life === undefined;
    if (life === undefined) {
      this.#selected = null;
      return;
    }
    const facts = factsOf(life, now);
    const content = JSON.stringify([facts, life.parent, life.child]);
    if (detail.dataset.content === content) return;
    detail.dataset.content = content;
    const list = element("dl");
    for (const [name, value] of facts) list.append(element("div", {}, element("dt", {}, name), element("dd", {}, element("bdi", {}, value))));
    const focused = detail.contains(document.activeElement) ? document.activeElement.dataset.rid : undefined;
    const links = [
      ["Continues", life.parent],
      ["Handed off to", life.child],
    ].filter(([, rid]) => rid !== undefined);
    const buttons = links.map(([words, rid]) => this.#link(words, rid));
    detail.replaceChildren(list, ...buttons);
    buttons.find((button) => button.dataset.rid === focused)?.focus();
  }

  #link(words, rid) {
    const button = element("button", { type: "button" }, `${words} `, element("bdi", {}, visible(shortened(rid, 40))));
    button.dataset.rid = rid;
    button.addEventListener("click", () => {
      const folded = this.#rows.find((each) => each.isFolded && each.members.some(({ life }) => life.rid === rid));
      if (folded !== undefined) {
        this.#fold(folded, false);
        this.#draw();
      }
      const row = this.#rows.find((each) => each.life?.rid === rid);
      if (row === undefined || row.key === this.#selected) return;
      this.#select(row);
      this.scene.reveal(row.place * ROW, AXIS + (row.place + 1) * ROW);
    });
    return button;
  }
}
