// Draws the timeline: a row for each request, a bar for each phase, a line from parent to child where KV passed on.

import { fitted, hatch } from "../drawing/canvas.js";
import { passage } from "./lives.js";
import { count, shortened, visible } from "../drawing/format.js";

export const ROW = 22;
export const AXIS = 22;

const HEIGHTS = { queued: 6, loading: 10, prefill: 14, decode: 14, retracted: 10, leased: 5 };

export class LivesPainter {
  constructor(theme) {
    this.theme = theme;
    this.patterns = null;
    theme.onChange(() => (this.patterns = null));
  }

  /** time: {from, to, now} in seconds of the server; gutter: width of the names, on the left. */
  paint(scene, rows, time, { gutter, selected, deadlines }) {
    const pen = scene.begin();
    this.patterns ??= {
      loading: hatch(pen, this.theme.colour("bar-loading"), 4, 1.6),
      retracted: hatch(pen, this.theme.colour("bar-retracted"), 4, 1.6),
    };
    pen.font = `11px ${this.theme.colour("font")}`;
    pen.textBaseline = "middle";
    const room = Math.max(1, scene.width - gutter);
    const place = { pen, time, gutter, right: scene.width, x: (t) => gutter + ((t - time.from) / (time.to - time.from)) * room };
    const y = new Map(rows.map((row, index) => [row, AXIS + index * ROW - scene.top + ROW / 2]));
    pen.save();
    pen.beginPath();
    pen.rect(gutter, 0, room, scene.height);
    pen.clip();
    this.#grid(place, scene.height);
    const seen = rows.filter((row) => y.get(row) > AXIS - ROW && y.get(row) < scene.height + ROW);
    for (const row of seen) {
      if (row.key === selected) {
        pen.fillStyle = this.theme.colour("selected");
        pen.fillRect(gutter, y.get(row) - ROW / 2, room, ROW);
      }
    }
    for (const row of seen) {
      for (const life of livesIn(row)) this.#bars(place, life, y.get(row), deadlines.get(life.rid));
    }
    for (const row of rows) {
      if (row.parent !== null && y.has(row.parent)) this.#passage(place, row, y.get(row.parent), y.get(row), scene.height);
    }
    this.#axis(place, room);
    pen.restore();
  }

  #ticks({ from, to, now }) {
    const span = to - from;
    const step = [1, 2, 5, 10, 15, 30, 60, 120].find((each) => span / each <= 8) ?? 120;
    const ticks = [];
    for (let back = 0; now - back > from; back += step) ticks.push([now - back, back]);
    return ticks;
  }

  #grid({ pen, time, x }, height) {
    pen.strokeStyle = this.theme.colour("grid");
    pen.lineWidth = 1;
    for (const [moment, back] of this.#ticks(time)) {
      pen.strokeStyle = this.theme.colour(back === 0 ? "grid-now" : "grid");
      const at = Math.round(x(moment)) + 0.5;
      pen.beginPath();
      pen.moveTo(at, AXIS - 4);
      pen.lineTo(at, height);
      pen.stroke();
    }
  }

  /** Drawn last, as it stays while the rows scroll under it. */
  #axis({ pen, time, gutter, x }, room) {
    pen.fillStyle = this.theme.colour("panel");
    pen.fillRect(gutter, 0, room, AXIS - 4);
    pen.fillStyle = this.theme.colour("ink-2");
    pen.textAlign = "center";
    for (const [moment, back] of this.#ticks(time)) {
      const at = x(moment);
      if (at - gutter < 24) continue;
      const label = back === 0 ? "now" : back % 60 === 0 ? `−${back / 60} min` : `−${back} s`;
      pen.fillText(label, at, (AXIS - 4) / 2);
    }
    pen.textAlign = "left";
  }

  #bars(place, life, y, deadline) {
    const { pen, time, right, gutter, x } = place;
    let lastX = -1;
    for (const [kind, begin, end, tokens] of life.phases) {
      const from = Math.max(gutter - 2, x(begin));
      const to = Math.min(right + 2, x(end ?? time.now));
      if (to < gutter || from > right) continue;
      // Phases too short to be seen keep a pixel, but many in one pixel are drawn once.
      if (to - from < 0.5 && from - lastX < 0.5) continue;
      lastX = to;
      this.#bar(pen, kind, from, Math.max(1.5, to - from - (kind === "prefill" ? 1 : 0)), y, tokens);
      if (kind === "leased" && end === null && deadline !== undefined) this.#deadline(place, deadline, y);
    }
    if (life.end === "abort" || life.end === "error") this.#cross(pen, x(endOf(life) ?? time.now), y);
  }

  #bar(pen, kind, left, width, y, tokens) {
    const height = HEIGHTS[kind] ?? 10;
    const top = y - height / 2;
    const colour = this.theme.colour(kind in HEIGHTS ? `bar-${kind}` : "bar-queued");
    if (kind === "loading" || kind === "retracted") {
      pen.fillStyle = this.patterns[kind];
      pen.fillRect(left, top, width, height);
    }
    if (kind === "queued" || kind === "loading" || kind === "retracted") {
      pen.strokeStyle = colour;
      pen.lineWidth = 1;
      pen.strokeRect(left + 0.5, top + 0.5, Math.max(0.5, width - 1), height - 1);
      return;
    }
    pen.fillStyle = colour;
    pen.beginPath();
    pen.roundRect(left, top, width, height, Math.min(2, width / 2));
    pen.fill();
    if (kind !== "leased" && tokens > 0 && width >= 30) {
      pen.fillStyle = this.theme.colour("on-bar");
      const text = fitted(pen, count(tokens), width - 8);
      if (text) pen.fillText(text, left + 4, y + 0.5);
    }
  }

  /** What is still ahead of a lease: a dotted line up to its deadline. */
  #deadline({ pen, time, x, right }, deadline, y) {
    const from = x(time.now);
    const to = Math.min(right, x(deadline));
    if (to <= from) return;
    pen.strokeStyle = this.theme.colour("lease");
    pen.lineWidth = 1.5;
    pen.setLineDash([2, 3]);
    pen.beginPath();
    pen.moveTo(from + 2, y);
    pen.lineTo(to, y);
    pen.stroke();
    pen.setLineDash([]);
  }

  #cross(pen, at, y) {
    pen.strokeStyle = this.theme.colour("bad");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.moveTo(at + 3, y - 4);
    pen.lineTo(at + 11, y + 4);
    pen.moveTo(at + 11, y - 4);
    pen.lineTo(at + 3, y + 4);
    pen.stroke();
  }

  #passage({ pen, time, right, x, gutter }, row, above, below, height) {
    if (Math.max(above, below) < 0 || Math.min(above, below) > height + ROW) return;
    const found = passage(row);
    const from = Math.max(gutter, x(found.from));
    const to = Math.max(gutter, x(found.to));
    const handoff = row.life.path === "handoff" || (row.life.path === undefined && found.leased);
    pen.strokeStyle = this.theme.colour(handoff ? "lease" : "ink-3");
    pen.fillStyle = pen.strokeStyle;
    pen.lineWidth = handoff ? 2 : 1.25;
    if (!handoff) pen.setLineDash([3, 3]);
    // Down from the end of the lease, then into the child's first bar from above.
    const end = below - HEIGHTS.prefill / 2 - 1;
    const bend = Math.min(7, Math.abs(to - from) / 2);
    const middle = above + ROW / 2;
    pen.beginPath();
    pen.moveTo(from, above);
    if (to - from < 2) {
      pen.lineTo(to, end - 4);
    } else {
      pen.lineTo(from, middle - bend);
      pen.quadraticCurveTo(from, middle, from + bend, middle);
      pen.lineTo(to - bend, middle);
      pen.quadraticCurveTo(to, middle, to, middle + bend);
      pen.lineTo(to, end - 4);
    }
    pen.stroke();
    pen.setLineDash([]);
    pen.beginPath();
    pen.arc(from, above, 3.5, 0, 2 * Math.PI);
    pen.moveTo(to, end + 1);
    pen.lineTo(to - 4, end - 5);
    pen.lineTo(to + 4, end - 5);
    pen.closePath();
    pen.fill();
    if (handoff) this.#handed(pen, visible(shortened(row.life.rid, 60)), from, above, { now: x(time.now), right });
  }

  /**
   * In full where there is room, else the name alone, else nothing: the row's text says it, too. It stands before the
   * line of "now" or beyond it, and never on it.
   */
  #handed(pen, child, end, y, { now, right }) {
    const name = fitted(pen, child, 200);
    if (name === "") return;
    const label = placeLabel([`handed off to ${name}`, name], (words) => pen.measureText(words).width, end, now, right);
    if (label === null) return;
    const { words, from } = label;
    pen.fillStyle = this.theme.colour("panel");
    pen.globalAlpha = 0.8;
    pen.fillRect(from + 6, y - 8, pen.measureText(words).width + 6, 16);
    pen.globalAlpha = 1;
    pen.fillStyle = this.theme.colour("lease-ink");
    // Isolated, so that right-to-left names do not turn the words around them.
    pen.fillText(words.replace(name, `\u2068${name}\u2069`), from + 9, y + 0.5);
  }
}

/**
 * Where a label begins that belongs at ``end``: {words, from}, the first of the texts that fits before the line of
 * "now", else beyond it; null if none does. width(words): in pixels, as ``end``, ``now`` and ``right``, the edge.
 */
export function placeLabel(texts, width, end, now, right) {
  const places = [
    { from: end, to: now - 4 },
    { from: Math.max(end, now), to: right },
  ];
  for (const words of texts) {
    const place = places.find(({ from, to }) => from + 14 + width(words) <= to);
    if (place !== undefined) return { words, from: place.from };
  }
  return null;
}

/** A folded job has all its requests in one row. */
function livesIn(row) {
  if (row.life !== null) return [row.life];
  return row.isFolded ? row.members.map(({ life }) => life) : [];
}

/** When the request itself ended: before its lease. */
function endOf(life) {
  const own = life.phases.filter(([kind]) => kind !== "leased");
  return own.at(-1)?.[2] ?? null;
}
