// The page's data about the server. Everything here is bounded, however long the page stays open.

import { Clock } from "./clock.js";
import { Series } from "./series.js";

const MAX_LIVES = 200;
const MAX_PHASES = 600;
const MAX_LISTED = 100;
const MAX_SPANS = 2000;

export class Store {
  #pending = null;

  constructor() {
    this.clock = new Clock();
    this.series = new Series();
    this.hello = null;
    this.#forget();
  }

  #forget() {
    this.update = null;
    this.lives = new Map();
    this.tree = null;
    this.#pending = null;
  }

  get paused() {
    return this.#pending !== null;
  }

  /** While paused, what comes in is kept apart (the newest of each kind); charts go on collecting. */
  pause() {
    this.#pending ??= { update: null, lives: new Map(), tree: null };
    this.clock.freeze(true);
  }

  resume() {
    const pending = this.#pending;
    this.#pending = null;
    this.clock.freeze(false);
    if (pending === null) return;
    if (pending.update !== null) this.update = pending.update;
    if (pending.tree !== null) this.tree = pending.tree;
    this.#keepLives(this.lives, pending.lives.values());
  }

  /** Returns whether the server is another one than before: it was restarted. Then nothing is kept, nor paused. */
  greet(hello) {
    const restarted = this.hello !== null && this.hello.instance !== hello.instance;
    if (restarted) {
      this.#forget();
      this.series.clear();
      this.clock.reset();
    }
    this.hello = hello;
    this.clock.heard(hello.t);
    return restarted;
  }

  takeUpdate(update) {
    this.clock.heard(update.t);
    this.series.add(update.t, update.stats);
    const { lives, ...rest } = update;
    for (const name of ["running", "waiting", "leases", "jobs"]) rest[name] = rest[name].slice(0, MAX_LISTED);
    const target = this.#pending ?? this;
    target.update = rest;
    this.#keepLives(target.lives, lives);
  }

  takeTree(tree) {
    (this.#pending ?? this).tree = { ...tree, spans: tree.spans.slice(0, MAX_SPANS) };
  }

  #keepLives(kept, lives) {
    for (const life of lives) {
      const said = Object.entries(life).filter(([, value]) => value !== null);
      kept.set(lifeKey(life), { ...Object.fromEntries(said), phases: life.phases.slice(-MAX_PHASES) });
    }
    if (kept.size <= MAX_LIVES) return;
    const oldest = [...kept].sort(([, one], [, other]) => lastMoment(one) - lastMoment(other));
    for (const [key] of oldest.slice(0, kept.size - MAX_LIVES)) kept.delete(key);
  }
}

export function lifeKey(life) {
  return `${life.rid}\n${life.index}`;
}

/** When the life began, and when it was last heard of (Infinity while something of it goes on). */
export function firstMoment(life) {
  return life.phases.length ? life.phases[0][1] : 0;
}

export function lastMoment(life) {
  return life.phases.reduce((latest, [, begin, end]) => Math.max(latest, end ?? Infinity, begin), 0);
}
