// Draws the part of an icicle that is in view.

import { fitted, hatch } from "../drawing/canvas.js";
import { heat } from "./icicle.js";
import { labelOf } from "./icicle_words.js";

export const ROW = 21;
const GAP = 1;
const LEAST = 0.75;

export class IciclePainter {
  constructor(theme) {
    this.theme = theme;
    this.patterns = null;
    theme.onChange(() => (this.patterns = null));
  }

  /**
   * view: {from, to}, the shares of the whole at the left and the right edge; lit: Map from key to the strength (0 to 1)
   * of a span that was just used.
   */
  paint(scene, icicle, view, { hovered, lit }) {
    const pen = scene.begin();
    this.patterns ??= { collapsed: hatch(pen, this.theme.colour("mark-more"), 6, 1) };
    pen.textBaseline = "middle";
    pen.font = `11px ${this.theme.colour("font")}`;
    const scale = scene.width / (view.to - view.from);
    const first = Math.max(0, Math.floor(scene.top / ROW));
    const last = Math.min(icicle.rows.length - 1, Math.ceil((scene.top + scene.height) / ROW));
    const place = { view, scale, width: scene.width, pixels: scene.scale, lit };
    for (let row = first; row <= last; row++) {
      this.#row(pen, icicle.rows[row], { ...place, top: row * ROW - scene.top });
    }
    if (hovered) this.#outline(pen, hovered, view, scale, scene, this.theme.colour("accent"));
  }

  #row(pen, nodes, place) {
    // Neighbours too narrow to be seen are drawn as one.
    let crumbsFrom = null;
    let crumbsTo = 0;
    const sweep = () => {
      if (crumbsFrom === null) return;
      pen.fillStyle = this.theme.colour("mark-more");
      pen.fillRect(crumbsFrom, place.top, Math.max(0.5, crumbsTo - crumbsFrom), ROW - GAP);
      crumbsFrom = null;
    };
    for (const node of nodes) {
      const left = (node.left - place.view.from) * place.scale;
      const right = left + node.share * place.scale;
      if (right < 0 || left > place.width) continue;
      if (right - left >= LEAST) {
        sweep();
        // On whole pixels of the screen, so that narrow neighbours stay apart and keep their colours.
        const from = Math.round(Math.max(0, left) * place.pixels) / place.pixels;
        const to = Math.round(Math.min(place.width, right) * place.pixels) / place.pixels;
        this.#span(pen, node, from, Math.max(1 / place.pixels, to - from), place);
      } else {
        if (crumbsFrom !== null && left - crumbsTo > 1) sweep();
        crumbsFrom ??= left;
        crumbsTo = right;
      }
    }
    sweep();
  }

  #span(pen, node, left, width, { top, lit }) {
    const inner = width > 2 ? width - GAP : width;
    const height = ROW - GAP;
    const known = node.kind === "span" || node.kind === "collapsed";
    pen.fillStyle = this.theme.colour(known ? `${tierColour(node)}-${heat(node.idle)}` : "structure");
    pen.fillRect(left, top, inner, height);
    if (node.kind === "collapsed") {
      pen.fillStyle = this.patterns.collapsed;
      pen.fillRect(left, top, inner, height);
    }
    const strength = lit.get(node.key);
    if (strength) {
      pen.globalAlpha = 0.55 * strength;
      pen.fillStyle = this.theme.colour("lit");
      pen.fillRect(left, top, inner, height);
      pen.globalAlpha = 1;
    }
    this.#marks(pen, node, left, top, inner, height);
    this.#label(pen, node, left, top, inner, height);
  }

  #marks(pen, node, left, top, width, height) {
    if (node.flags.includes("S")) {
      pen.fillStyle = this.theme.colour("lease");
      pen.fillRect(left, top + height - 4, width, 4);
    }
    if (node.flags.includes("L")) {
      pen.strokeStyle = pen.fillStyle = this.theme.colour("mark-locked");
      pen.lineWidth = 1;
      // Too narrow for a frame: its upper edge alone.
      if (width < 6) pen.fillRect(left, top, width, 2);
      else pen.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
    }
    if (node.flags.includes("R") && width > 3) {
      pen.strokeStyle = this.theme.colour("mark-retired");
      pen.lineWidth = 1;
      pen.setLineDash([2, 3]);
      pen.strokeRect(left + 1.5, top + 1.5, width - 3, height - 3);
      pen.setLineDash([]);
    }
  }

  #label(pen, node, left, top, width, height) {
    if (width < 18) return;
    const [figure, words] = labelOf(node);
    const y = top + height / 2 + (node.flags.includes("S") ? -1 : 0.5);
    const room = width - 10;
    const taken = figure === "" ? 0 : pen.measureText(figure).width;
    if (taken > room) return;
    pen.fillStyle = this.theme.colour(words === "" ? "ink" : "ink-figure");
    if (figure !== "") pen.fillText(figure, left + 5, y);
    const indent = taken === 0 ? 0 : taken + 8;
    const text = words === "" || room - indent < 30 ? "" : fitted(pen, words, room - indent);
    if (text === "") return;
    pen.fillStyle = this.theme.colour("ink");
    // Isolated, so that right-to-left text stays within its own span.
    pen.fillText(`\u2068${text}\u2069`, left + 5 + indent, y);
  }

  #outline(pen, node, view, scale, scene, colour) {
    const left = Math.max(0, (node.left - view.from) * scale);
    const right = Math.min(scene.width, (node.left + node.share - view.from) * scale);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(left + 1, node.depth * ROW - scene.top + 1, Math.max(2, right - left - GAP - 2), ROW - GAP - 2);
  }
}

function tierColour(node) {
  return node.tier === "host" || node.tier === "mixed" ? node.tier : "device";
}
